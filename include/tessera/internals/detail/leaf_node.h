// The node of a leaf in autograd's graph, which adds a gradient to the leaf's `.grad`. A node may
// also add to it in its place, with its lock (OpenGradient). Another node may replace it: that of a
// parameter that persists while another tensor stands in for it, so that autograd finds the
// gradient that a program asks for. There is no public way to ask for such a node or to set one.
//
// To 2.12 it is held by shared_ptr, from 2.13 by intrusive_ptr (graph_node.h). libtorch itself
// holds it weakly, and makes one where there is none.
//
// Canary: LeafNodeCanary.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <mutex>

#include "tessera/export.h"
#include "tessera/internals/detail/graph_node.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Has the leaf as `variable`.
using LeafNode = torch::autograd::AccumulateGrad;

inline LeafNode* as_leaf(const Edge& edge) {
  return dynamic_cast<LeafNode*>(edge.function.get());
}

/// libtorch's node in the graph of a call of grad() for a tensor that no root leads to.
inline bool is_unreachable(const Edge& edge) {
  return dynamic_cast<const torch::autograd::Identity*>(edge.function.get()) != nullptr;
}

/// The node of a leaf that requires a gradient.
inline NodePtr<Node> leaf_node(const at::Tensor& leaf) {
  return torch::autograd::impl::grad_accumulator(leaf);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using WeakNodePtr = std::weak_ptr<Node>;
#else
using WeakNodePtr = c10::weak_intrusive_ptr<Node>;
#endif

/// `.grad` of a leaf for a node whose result would only be added to it: the node may add to it
/// within its computation instead, and return an undefined gradient. The leaf's node takes its lock
/// for that, which this holds.
class OpenGradient {
 public:
  /// For what `node`, which runs on this thread, returns for `edge`. There is none where anything
  /// else would see the term: where the backward returns gradients or is recorded, where `edge`
  /// leads to no leaf, or to one without a gradient, with hooks of the program, or of another
  /// stream.
  OpenGradient(Node& node, const Edge& edge);
  /// Undefined: there is none.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  std::unique_lock<std::mutex> lock_;
  at::Tensor tensor_;
};

/// Whoever calls keeps `node` alive.
inline void set_leaf_node(const at::Tensor& leaf, const NodePtr<Node>& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, WeakNodePtr(node));
}

}  // namespace tessera::detail
TESSERA_API_END
