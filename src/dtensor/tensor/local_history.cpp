// Autograd's graph as the mark of local tensors: plain operators hand it on for nothing, where a
// wrapper or a dispatch key would cost each of them.

#include "tessera/dtensor/detail/local_history.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <typeinfo>

#include "tensor/node_kinds.h"
#include "tensor/to_local_node.h"

namespace tessera::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

/// Enough for all that lies between two styles; what was forgotten is looked at again.
constexpr std::size_t kMostKnown = std::size_t{1} << 16;

void mix(std::uint64_t& signature, std::uint64_t value) {
  signature = (signature ^ value) * 0x9e3779b97f4a7c15;
}

}  // namespace

LocalHistory::Sources LocalHistory::trace(const at::Tensor& tensor) {
  Sources sources;
  if (!tensor.requires_grad()) {
    return sources;
  }
  if (tensor.is_leaf()) {
    sources.leaves.push_back(tensor);
    return sources;
  }
  if (known_.size() > kMostKnown) {
    forget();
  }
  std::vector<Node*> open{tensor.grad_fn().get()};
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    const std::type_info& type = typeid(*node);
    if (type == typeid(AccumulateGrad)) {
      const at::Tensor& leaf = static_cast<AccumulateGrad*>(node)->variable;
      if (!tessera::is_distributed(leaf)) {
        sources.leaves.push_back(leaf);
      }
      continue;
    }
    const NodeKind* kind = kind_of(*node);
    // Also of a known one: who asked before had one of the pieces, maybe.
    sources.cut = sources.cut || (kind != nullptr && kind->cuts);
    if (!known_.emplace(node, node->sequence_nr()).second) {
      continue;
    }
    mix(sources.signature, reinterpret_cast<std::uintptr_t>(&type));
    if (kind != nullptr && kind->reads != nullptr) {
      for (const ReadDim& read : kind->reads(*node)) {
        mix(sources.signature, static_cast<std::uint64_t>(read.dim));
      }
    }
    if (type == typeid(ToLocalBackward)) {
      const auto& given = static_cast<const ToLocalBackward&>(*node);
      sources.given.push_back({given.spec->sharding.mesh, given.layout, given.spec->sharding.layout,
                               given.spec->sizes});
      continue;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (edge.is_valid()) {
        open.push_back(edge.function.get());
      }
    }
  }
  return sources;
}

}  // namespace tessera::detail
