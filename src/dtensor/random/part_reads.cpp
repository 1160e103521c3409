// Whether plain operators computed along a dimension of which each rank has a part: a softmax of a
// rank's own features is no part of the softmax of all. Sizes don't tell, but autograd's nodes have
// the dimensions, and its graph where the part came from.

#include "tessera/dtensor/detail/part_reads.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "random/local_part.h"
#include "random/pieces.h"
#include "tensor/node_kinds.h"
#include "tensor/to_local_node.h"

namespace tessera::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

Edge edge_of(const at::Tensor& tensor) {
  return {tensor.grad_fn(), static_cast<std::uint32_t>(tensor.output_nr())};
}

/// Whether what meets is a rank's share of each of a fused weight's parts, position by position.
bool meets_by_parts(const LocalPart::Dim& dim, std::int64_t size, std::int64_t pieces) {
  return pieces > 1 && size % pieces == 0 && has_whole_parts(dim, 0, size / pieces);
}

/// The dimension, if what `read` says of `part`, of `sizes`, is split; of all dimensions the first.
/// None of a single position: a view, which is followed by its sizes, may have taken it for
/// another.
std::optional<std::int64_t> split_dim(const LocalPart& part, const ReadDim& read,
                                      const std::vector<std::int64_t>& sizes) {
  const auto dims = std::ssize(part.dims);
  for (std::int64_t i = 0; i < dims; ++i) {
    const auto d = static_cast<std::size_t>(i);
    if ((read.dim == ReadDim::kAll || counted_from_front(read.dim, dims) == i) && sizes[d] != 1 &&
        is_split_dim(part.dims[d]) && !meets_by_parts(part.dims[d], sizes[d], read.pieces)) {
      return i;
    }
  }
  return std::nullopt;
}

class ReadSearch {
 public:
  std::optional<PartRead> from(const Node* root) {
    std::vector<Place> open{{root, false}};
    std::set<Place> seen;
    while (!open.empty()) {
      const Place place = open.back();
      open.pop_back();
      const auto [node, is_behind] = place;
      if (!seen.insert(place).second) {
        continue;
      }
      if (const auto* given = dynamic_cast<const ToLocalBackward*>(node)) {
        meshes_.push_back(given->spec->sharding.mesh);
        continue;
      }
      if (auto read = read_by(*node, is_behind)) {
        return read;
      }
      for (const Edge& next : node->next_edges()) {
        if (next.is_valid()) {
          open.emplace_back(next.function.get(), is_behind || is_of_a_program(*node));
        }
      }
    }
    return std::nullopt;
  }

  /// After from(): why `tensor` is not the share along `dim`.
  std::optional<PartRead> misfit(const at::Tensor& tensor, const DeviceMesh& mesh,
                                 std::int64_t dim) {
    using How = PartRead::How;
    const Edge edge = edge_of(tensor);
    const LocalPart& part = parts_.of(edge);
    const auto found = [&](How how, std::int64_t at) {
      return PartRead{how, part.unknown_by,        tensor.sizes().vec(),
                      at,  parameter_behind(edge), part.unknown};
    };
    if (part.of_a_program || tensor.numel() == 0) {
      return std::nullopt;
    }
    if (!part.unknown.empty()) {
      return found(How::kUnknown, dim);
    }
    if (!part.piece.empty()) {
      return found(How::kPiece, dim);
    }
    // A sequence may be split over another mesh.
    const bool one_mesh = std::ranges::all_of(meshes_, [&](const auto& m) { return m == mesh; });
    for (std::int64_t d = 0; one_mesh && d < tensor.dim(); ++d) {
      const LocalPart::Dim& digits = part.dims[static_cast<std::size_t>(d)];
      if (is_split_dim(digits) &&
          (d != counted_from_front(dim, tensor.dim()) || !is_in_order(digits))) {
        return found(How::kReordered, d);
      }
    }
    return std::nullopt;
  }

 private:
  /// A node, and whether a program's own function is between it and the end.
  using Place = std::pair<const Node*, bool>;

  std::optional<PartRead> read_by(const Node& node, bool is_behind) {
    const NodeKind* kind = kind_of(node);
    if (kind == nullptr || kind->reads == nullptr || (kind->reduces && is_behind)) {
      return std::nullopt;
    }
    for (const ReadDim& read : kind->reads(node)) {
      const Edge& edge = node.next_edge(read.argument);
      if (!edge.is_valid()) {
        continue;
      }
      const LocalPart& part = parts_.of(edge);
      const std::vector<std::int64_t> sizes = sizes_of_result(edge);
      if (const auto dim = split_dim(part, read, sizes); dim && part.unknown.empty()) {
        return PartRead{
            PartRead::How::kAcross, operator_name(node), sizes, *dim, parameter_behind(edge), ""};
      }
    }
    return std::nullopt;
  }

  LocalParts parts_{LocalParts::Pieces::kWhole};
  std::vector<DeviceMesh> meshes_;  ///< of the distributed tensors that it came to
};

class LeafSearch {
 public:
  explicit LeafSearch(const std::function<bool(const at::Tensor&)>& counts) : counts_(counts) {}

  at::Tensor from(const Node* root) {
    std::vector<const Node*> open{root};
    std::unordered_set<const Node*> seen;
    while (!open.empty()) {
      const Node* node = open.back();
      open.pop_back();
      if (!seen.insert(node).second || dynamic_cast<const ToLocalBackward*>(node) != nullptr) {
        continue;
      }
      if (at::Tensor leaf = met_at(*node); leaf.defined()) {
        return leaf;
      }
      for (const Edge& next : node->next_edges()) {
        if (next.is_valid()) {
          open.push_back(next.function.get());
        }
      }
    }
    return {};
  }

 private:
  at::Tensor met_at(const Node& node) {
    bool any_part = false;
    at::Tensor leaf;
    for (const Edge& next : node.next_edges()) {
      if (!next.is_valid()) {
        continue;
      }
      const LocalPart& part = parts_.of(next);
      if (part.unknown.empty() && std::ranges::any_of(part.dims, is_split_dim)) {
        any_part = true;
      } else if (part.is_whole() && !leaf.defined()) {
        leaf = leaf_behind(*next.function);
      }
    }
    return any_part ? leaf : at::Tensor();
  }

  /// The first leaf that counts.
  at::Tensor leaf_behind(const Node& from) const {
    std::vector<const Node*> open{&from};
    std::unordered_set<const Node*> seen;
    while (!open.empty()) {
      const Node* node = open.back();
      open.pop_back();
      if (const auto* end = dynamic_cast<const AccumulateGrad*>(node)) {
        if (counts_(end->variable)) {
          return end->variable;
        }
      } else if (seen.insert(node).second &&
                 dynamic_cast<const ToLocalBackward*>(node) == nullptr) {
        for (const Edge& next : node->next_edges()) {
          if (next.is_valid()) {
            open.push_back(next.function.get());
          }
        }
      }
    }
    return {};
  }

  const std::function<bool(const at::Tensor&)>& counts_;
  LocalParts parts_{LocalParts::Pieces::kWhole};
};

}  // namespace

std::optional<PartRead> part_read(const at::Tensor& tensor) {
  return tensor.grad_fn() == nullptr ? std::nullopt : ReadSearch().from(tensor.grad_fn().get());
}

std::optional<PartRead> not_a_share(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    std::int64_t dim) {
  if (tensor.grad_fn() == nullptr) {
    return std::nullopt;
  }
  ReadSearch search;
  auto read = search.from(tensor.grad_fn().get());
  return read ? std::move(read) : search.misfit(tensor, mesh, dim);
}

bool is_part(const at::Tensor& tensor) {
  if (tensor.grad_fn() == nullptr) {
    return false;
  }
  LocalParts parts(LocalParts::Pieces::kWhole);
  const LocalPart& part = parts.of(edge_of(tensor));
  return !part.of_a_program && (!part.is_whole() || !part.piece.empty());
}

at::Tensor leaf_met_by_part(const at::Tensor& tensor,
                            const std::function<bool(const at::Tensor& leaf)>& counts) {
  return tensor.grad_fn() == nullptr ? at::Tensor()
                                     : LeafSearch(counts).from(tensor.grad_fn().get());
}

}  // namespace tessera::detail
