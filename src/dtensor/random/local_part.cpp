// Which part a plain tensor is: of the heads, of the sequence. No plain tensor carries a layout,
// but autograd has recorded how it was computed from local tensors whose layouts are known. Nodes
// have the sizes of their results, so that only views and matrix products need more than those.

#include "random/local_part.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>

#include "random/part_operations.h"
#include "random/pieces.h"
#include "random/pointwise_nodes.h"
#include "tensor/node_kinds.h"
#include "tensor/to_local_node.h"
#include "tessera/core/layout_math.h"

namespace tessera::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using PartDigit = LocalPart::Digit;

/// What this rank has of a digit of a layout: mesh dimensions cut it one after another.
PartDigit part_of_digit(const Layout& layout, const tessera::Digit& digit, std::int64_t size,
                        std::span<const std::int64_t> coordinate) {
  PartDigit part{.local = digit.extent > 0 ? digit.extent : size};
  part.global = part.local;
  for (const int mesh_dim : digit.mesh_dims) {
    const auto m = static_cast<std::size_t>(mesh_dim);
    part.offset += chunk_offset(part.local, layout.mesh_sizes()[m], coordinate[m]);
    part.local = chunk_size(part.local, layout.mesh_sizes()[m], coordinate[m]);
  }
  return part;
}

LocalPart part_given(const ToLocalBackward& node) {
  const std::vector<std::int64_t>& sizes = node.spec->sizes;
  if (node.layout->is_partial()) {
    return parts::unknown("a local tensor laid out as " + to_string(*node.layout));
  }
  LocalPart part = LocalPart::whole(sizes);
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const std::vector<tessera::Digit>& digits = node.layout->digits(static_cast<int>(d));
    if (!digits.empty()) {
      part.dims[d].clear();
    }
    for (const tessera::Digit& digit : digits) {
      part.dims[d].push_back(
          part_of_digit(*node.layout, digit, sizes[d], node.spec->sharding.mesh.coordinate()));
    }
  }
  return part;
}

std::optional<LocalPart> viewed_by(const Node& node, LocalPart part,
                                   const std::vector<std::int64_t>& sizes) {
  namespace nodes = torch::autograd::generated;
  if (const auto* transpose = dynamic_cast<const nodes::TransposeBackward0*>(&node)) {
    return parts::transposed(std::move(part), transpose->dim0, transpose->dim1);
  }
  if (const auto* permute = dynamic_cast<const nodes::PermuteBackward0*>(&node)) {
    return parts::permuted(part, permute->dims);
  }
  if (const auto* unsqueeze = dynamic_cast<const nodes::UnsqueezeBackward0*>(&node)) {
    return parts::unsqueezed(std::move(part), unsqueeze->dim);
  }
  if (typeid(node) == typeid(nodes::TBackward0)) {
    return parts::transposed(std::move(part), 0, -1);
  }
  return is_reshaping(node) ? std::optional(parts::viewed(part, sizes)) : std::nullopt;
}

/// Views of numbers as complex ones, and what repeats or leaves out positions.
std::optional<LocalPart> resized_by(const Node& node, LocalPart part,
                                    const std::vector<std::int64_t>& sizes) {
  namespace nodes = torch::autograd::generated;
  if (typeid(node) == typeid(nodes::ViewAsRealBackward0)) {
    part.dims.push_back({{2, 2, 0}});
    return part;
  }
  if (typeid(node) == typeid(nodes::ViewAsComplexBackward0) && !is_split_dim(part.dims.back())) {
    part.dims.pop_back();
    return part;
  }
  if (typeid(node) == typeid(nodes::ExpandBackward0)) {
    return parts::expanded(std::move(part), sizes);
  }
  if (const auto* repeat = dynamic_cast<const nodes::RepeatBackward0*>(&node)) {
    std::vector<std::int64_t> repeats;
    for (const c10::SymInt& times : repeat->repeats) {
      repeats.push_back(times.guard_int(__FILE__, __LINE__));
    }
    return parts::repeated(std::move(part), repeats);
  }
  if (const auto* select = dynamic_cast<const nodes::IndexSelectBackward0*>(&node)) {
    return parts::selected(std::move(part), select->dim, sizes);
  }
  if (const auto* slice = dynamic_cast<const nodes::SliceBackward0*>(&node)) {
    return parts::strided(std::move(part), slice->dim, slice->step.guard_int(__FILE__, __LINE__),
                          sizes);
  }
  return std::nullopt;
}

/// Of matrices, one of which may need no gradient. Those that are added to the product are aligned
/// with it.
std::optional<LocalPart> product_of(const Node& node, std::vector<LocalPart> arguments,
                                    const std::vector<std::int64_t>& sizes) {
  namespace nodes = torch::autograd::generated;
  const bool adds = typeid(node) == typeid(nodes::AddmmBackward0) ||
                    typeid(node) == typeid(nodes::BaddbmmBackward0);
  if (!adds && typeid(node) != typeid(nodes::MmBackward0) &&
      typeid(node) != typeid(nodes::BmmBackward0)) {
    return std::nullopt;
  }
  for (std::size_t i = adds ? 1 : 0; i < arguments.size(); ++i) {
    if (arguments[i].dims.empty()) {
      arguments[i] = LocalPart::whole(sizes);
    }
  }
  const std::size_t first = adds ? 1 : 0;
  LocalPart product = parts::multiplied(arguments[first], arguments[first + 1], sizes);
  return adds && product.unknown.empty() ? parts::aligned({arguments[0], product}, sizes) : product;
}

std::vector<LocalPart> aligned_arguments(const Edge& edge, const NodeKind& kind,
                                         std::vector<LocalPart> arguments) {
  const bool each = kind.aligned == NodeKind::Aligned::kEach;
  const std::size_t one = each ? edge.input_nr : 0;
  if (each || (kind.aligned == NodeKind::Aligned::kWithFirst && !arguments[0].dims.empty())) {
    return {std::move(arguments[one])};
  }
  return arguments;
}

/// Of what was cut across its two halves.
LocalPart gated(LocalPart part, const ReadDim& read, const std::vector<std::int64_t>& sizes) {
  LocalPart::Dim& dim =
      part.dims[static_cast<std::size_t>(counted_from_front(read.dim, std::ssize(part.dims)))];
  if (has_whole_parts(dim, 0, sizes[static_cast<std::size_t>(&dim - part.dims.data())])) {
    dim.erase(dim.begin());
  }
  return part;
}

LocalPart computed(const Edge& edge, std::vector<LocalPart> arguments,
                   const std::vector<std::int64_t>& sizes, LocalParts::Pieces pieces) {
  const Node& node = *edge.function;
  if (const auto piece = piece_of(edge)) {
    return parts::cut(arguments[0], *piece, pieces);
  }
  if (const auto how = puts_together(node)) {
    return parts::put_together(arguments, *how, sizes);
  }
  if (auto view = viewed_by(node, arguments[0], sizes)) {
    return *std::move(view);
  }
  if (auto result = resized_by(node, arguments[0], sizes)) {
    return *std::move(result);
  }
  if (auto product = product_of(node, arguments, sizes)) {
    return *std::move(product);
  }
  const NodeKind* kind = kind_of(node);
  if (kind == nullptr) {
    return is_pointwise(node) ? parts::aligned(arguments, sizes) : parts::unknown(node.name());
  }
  if (kind->reduces && !arguments[0].dims.empty()) {
    return parts::reduced(arguments[0], kind->reads(node), sizes);
  }
  if (kind->aligned == NodeKind::Aligned::kNot) {
    return parts::unknown(node.name());
  }
  const auto reads = kind->reads != nullptr ? kind->reads(node) : std::vector<ReadDim>{};
  if (reads.size() == 1 && reads[0].pieces > 1) {
    arguments[0] = gated(std::move(arguments[0]), reads[0], sizes);
  } else if (parts::reads_split(arguments, reads)) {
    return parts::unknown(node.name());
  }
  return parts::aligned(aligned_arguments(edge, *kind, std::move(arguments)), sizes);
}

}  // namespace

const LocalPart& LocalParts::of(const Edge& edge) {
  // Without a recursion, since graphs are deep.
  std::vector<Edge> open{edge};
  while (!open.empty()) {
    const Edge now = open.back();
    const Key key(now.function.get(), now.input_nr);
    if (found_.contains(key)) {
      open.pop_back();
    } else if (add_missing(now, open)) {
      found_.emplace(key, part_of(now));
      open.pop_back();
    }
  }
  return found_.at({edge.function.get(), edge.input_nr});
}

/// Adds what `edge` was computed from and is not known. Returns whether all is.
bool LocalParts::add_missing(const Edge& edge, std::vector<Edge>& open) const {
  if (is_source(*edge.function)) {
    return true;
  }
  bool complete = true;
  for (const Edge& next : edge.function->next_edges()) {
    if (next.is_valid() && !found_.contains({next.function.get(), next.input_nr})) {
      open.push_back(next);
      complete = false;
    }
  }
  return complete;
}

LocalPart LocalParts::part_of(const Edge& edge) const {
  const Node& node = *edge.function;
  if (const auto* given = dynamic_cast<const ToLocalBackward*>(&node)) {
    return part_given(*given);
  }
  const std::vector<std::int64_t> sizes = sizes_of_result(edge);
  std::vector<LocalPart> arguments;
  LocalPart::Dim piece;
  const LocalPart* unknown = nullptr;
  for (const Edge& next : node.next_edges()) {
    // What needs no gradient is taken to be the same on every rank.
    const LocalPart* part =
        next.is_valid() ? &found_.at({next.function.get(), next.input_nr}) : nullptr;
    arguments.push_back(part != nullptr ? *part : LocalPart{});
    if (part != nullptr && !part->unknown.empty() &&
        (unknown == nullptr || unknown->of_a_program)) {
      unknown = part;
    }
    piece = piece.empty() ? arguments.back().piece : piece;
  }
  if (unknown != nullptr && !is_of_a_program(node)) {
    return *unknown;
  }
  // Of whole tensors every operator makes a whole one.
  if (piece.empty() && std::ranges::all_of(arguments, &LocalPart::is_whole)) {
    return LocalPart::whole(sizes);
  }
  LocalPart result = is_of_a_program(node) ? parts::unknown(node.name())
                                           : computed(edge, std::move(arguments), sizes, pieces_);
  if (!result.unknown.empty()) {
    result.unknown_by = operator_name(node);
    result.of_a_program = is_of_a_program(node);
  }
  if (!puts_together(node) && result.unknown.empty() && result.piece.empty()) {
    result.piece = std::move(piece);
  }
  return result;
}

LocalPart local_part(const at::Tensor& tensor) {
  if (tensor.is_leaf()) {
    return LocalPart::whole(tensor.sizes());
  }
  return LocalParts(LocalParts::Pieces::kUnknown)
      .of(Edge(tensor.grad_fn(), static_cast<std::uint32_t>(tensor.output_nr())));
}

}  // namespace tessera::detail
