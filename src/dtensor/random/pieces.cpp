#include "random/pieces.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <typeinfo>
#include <unordered_set>

#include "tensor/to_local_node.h"

namespace tessera::detail {
namespace {

namespace nodes = torch::autograd::generated;
using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

std::int64_t number(const c10::SymInt& value) {
  return value.guard_int(__FILE__, __LINE__);
}

std::optional<Piece> piece_of_slice(const nodes::SliceBackward0& node) {
  const auto dims = std::ssize(node.self_sym_sizes);
  const std::int64_t dim = counted_from_front(node.dim, dims);
  const std::int64_t size = number(node.self_sym_sizes[static_cast<std::size_t>(dim)]);
  const std::int64_t start =
      std::max<std::int64_t>(0, counted_from_front(node.start ? number(*node.start) : 0, size));
  const std::int64_t end =
      std::min(size, counted_from_front(node.end ? number(*node.end) : size, size));
  // Every second element and the like: those of a part are those of the whole.
  if (number(node.step) != 1 || (start <= 0 && end >= size)) {
    return std::nullopt;
  }
  return Piece{.dim = dim, .begin = start, .length = std::max<std::int64_t>(0, end - start)};
}

Piece piece_of_split(const nodes::SplitBackward0& node, const Edge& edge) {
  const std::int64_t length = number(node.split_size);
  return {.dim = node.dim,
          .begin = static_cast<std::int64_t>(edge.input_nr) * length,
          .length = length,
          .count = node.num_inputs()};
}

Piece piece_of_split(const nodes::SplitWithSizesBackward0& node, const Edge& edge) {
  const auto& sizes = node.split_sizes;
  const bool equal = std::ranges::adjacent_find(sizes, std::not_equal_to{}) == sizes.end();
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < edge.input_nr; ++i) {
    begin += number(sizes[i]);
  }
  return {.dim = node.dim,
          .begin = begin,
          .length = number(sizes[edge.input_nr]),
          .count = equal ? std::ssize(sizes) : 0};
}

}  // namespace

bool is_source(const Node& node) {
  return typeid(node) == typeid(ToLocalBackward) || typeid(node) == typeid(AccumulateGrad);
}

std::vector<std::int64_t> sizes_of_result(const Edge& edge) {
  std::vector<std::int64_t> sizes;
  for (const c10::SymInt& size :
       edge.function->input_metadata(edge.input_nr).shape_as_dim_vector()) {
    sizes.push_back(number(size));
  }
  return sizes;
}

std::int64_t counted_from_front(std::int64_t index, std::int64_t size) {
  return index < 0 ? index + size : index;
}

std::optional<Piece> piece_of(const Edge& edge) {
  const Node& node = *edge.function;
  if (const auto* split = dynamic_cast<const nodes::SplitBackward0*>(&node)) {
    return piece_of_split(*split, edge);
  }
  if (const auto* split = dynamic_cast<const nodes::SplitWithSizesBackward0*>(&node)) {
    return piece_of_split(*split, edge);
  }
  if (const auto* slice = dynamic_cast<const nodes::SliceBackward0*>(&node)) {
    return piece_of_slice(*slice);
  }
  if (const auto* select = dynamic_cast<const nodes::SelectBackward0*>(&node)) {
    return Piece{.dim = select->dim, .begin = number(select->index), .removes_dim = true};
  }
  if (const auto* unbind = dynamic_cast<const nodes::UnbindBackward0*>(&node)) {
    return Piece{.dim = unbind->dim,
                 .begin = static_cast<std::int64_t>(edge.input_nr),
                 .count = node.num_inputs(),
                 .removes_dim = true};
  }
  return std::nullopt;
}

std::optional<PutTogether> puts_together(const Node& node) {
  if (const auto* cat = dynamic_cast<const nodes::CatBackward0*>(&node)) {
    return PutTogether{cat->dim, false};
  }
  if (const auto* stack = dynamic_cast<const nodes::StackBackward0*>(&node)) {
    return PutTogether{stack->dim, true};
  }
  return std::nullopt;
}

at::Tensor parameter_behind(const Edge& edge) {
  std::deque<Node*> open{edge.function.get()};
  std::unordered_set<const Node*> seen;
  std::int64_t features = -1;
  while (!open.empty()) {
    Node* node = open.front();
    open.pop_front();
    if (!seen.insert(node).second) {
      continue;
    }
    if (const auto* given = dynamic_cast<const ToLocalBackward*>(node)) {
      if (features >= 0) {  // of another module
        return {};
      }
      features = given->spec->sizes.empty() ? -1 : given->spec->sizes.back();
    } else if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
      if (leaf->variable.dim() > 0 && leaf->variable.size(0) == features) {
        return leaf->variable;
      }
      continue;
    }
    for (const Edge& next : node->next_edges()) {
      if (next.is_valid()) {
        open.push_back(next.function.get());
      }
    }
  }
  return {};
}

}  // namespace tessera::detail
