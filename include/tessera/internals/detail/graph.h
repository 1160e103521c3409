// Nodes of autograd's graph.
#pragma once

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// Nodes of autograd's graph for our own functions. The public way to add a function to the graph is
// torch::autograd::Function, whose node stores its values in a dictionary. The nodes below store
// their values as members, as libtorch's own nodes do.
//
// To 2.12 nodes are owned by std::shared_ptr, and freed by deleteNode so that a long chain of nodes
// that free each other does not overflow the stack. From 2.13 they are owned by c10::intrusive_ptr,
// which does this itself.
//
// Canary: GraphNodeCanary.

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

template <class T>
using NodePtr = std::shared_ptr<T>;

template <class T, class... Arguments>
NodePtr<T> make_node(Arguments&&... arguments) {
  return NodePtr<T>(new T(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
}

/// A node that lives, as one that refers to it.
inline NodePtr<Node> pointer_to(Node& node) {
  return node.shared_from_this();
}

/// `node` if it is a T, else nullptr.
template <class T>
NodePtr<T> node_cast(const NodePtr<Node>& node) {
  return std::dynamic_pointer_cast<T>(node);
}

#else

template <class T>
using NodePtr = c10::intrusive_ptr<T>;

template <class T, class... Arguments>
NodePtr<T> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

/// A node that lives, as one that refers to it.
inline NodePtr<Node> pointer_to(Node& node) {
  return NodePtr<Node>::unsafe_reclaim_from_nonowning(&node);
}

/// `node` if it is a T, else nullptr.
template <class T>
NodePtr<T> node_cast(const NodePtr<Node>& node) {
  auto* found = dynamic_cast<T*>(node.get());
  return found == nullptr ? NodePtr<T>() : NodePtr<T>::unsafe_reclaim_from_nonowning(found);
}

#endif

/// Whether autograd must record a function of these tensors.
template <class... Tensors>
bool is_recorded(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...);
}

/// The edges of a node whose backward sends gradients to these tensors, or to a list of tensors.
template <class... Tensors>
void set_inputs(Node& node, const Tensors&... inputs) {
  node.set_next_edges(torch::autograd::collect_next_edges(inputs...));
}

/// The edge to which the gradient of `tensor` goes.
inline Edge edge_to(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

/// Makes `node` the backward of `output`.
inline void set_node(const at::Tensor& output, const NodePtr<Node>& node) {
  torch::autograd::set_history(output, node);
}

// A tensor that a node of autograd's graph saves for backward. It makes no cycle if the tensor is a
// result of the node, it detects later writes, and saved-tensor hooks apply to it.
// torch::autograd::Function has such tensors in a list; the library's nodes have them as members.
//
// To 2.12 unpack() takes the node as shared_ptr, from 2.13 as intrusive_ptr: pointer_to() of
// GraphNode gives either.
//
// Canary: SavedTensorCanary.

using torch::autograd::SavedVariable;

/// How one tensor is saved instead; see engine.h.
using torch::autograd::SavedVariableHooks;

/// Whether saved-tensor hooks are active for nodes that this thread makes now.
bool hooks_keep_tensors();

// The node of a leaf in autograd's graph, which adds a gradient to the `.grad` of the leaf. Another
// node may add to `.grad` itself, under the lock of the leaf's node (OpenGradient). The node of a
// leaf may also be replaced: autograd then finds the gradient of a parameter for which the graph
// contains another tensor. There is no public way to get or set this node.
//
// To 2.12 it is owned by shared_ptr, from 2.13 by intrusive_ptr. libtorch itself
// has only a weak pointer to it, and makes one if there is none.
//
// Canary: LeafNodeCanary.

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

/// `.grad` of a leaf, for a node whose result would only be added to it. The node may add its
/// result directly, and return an undefined gradient. This object has the lock of the leaf's node.
class OpenGradient {
 public:
  /// For the gradient that `node`, which runs on this thread, returns for `edge`. It is undefined
  /// if other code could see that gradient: if the backward returns gradients or is recorded, or if
  /// `edge` leads to no leaf, or to a leaf without `.grad`, with hooks of the program, or of
  /// another stream.
  OpenGradient(Node& node, const Edge& edge);
  /// Undefined: there is none.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  std::unique_lock<std::mutex> lock_;
  at::Tensor tensor_;
};

/// The caller keeps `node` alive.
inline void set_leaf_node(const at::Tensor& leaf, const NodePtr<Node>& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, WeakNodePtr(node));
}

// Calls before and after a node of autograd's graph runs. Public in C++ are hooks on tensors, which
// run before the node that made the tensor. Hooks on nodes are public in Python only.
//
// No version differs.
//
// Canary: NodeHooksCanary.

/// Both run on the thread of the node. Gradients pass unchanged.
void watch_node(Node& node, std::function<void()> before, std::function<void()> after);

// The numbers of the nodes of autograd's graph. Its engine runs the ready node with the highest
// number first. Two numbers tell which nodes a forward has made. at::RecordFunction says which
// number runs. There is no public way to ask for one.
//
// No version differs.
//
// Canary: SequenceNumberCanary.

/// The number of the node that this thread makes next.
inline std::uint64_t next_sequence_number() {
  return at::sequence_number::peek();
}
/// As next_sequence_number(), and takes the number: no other node gets it.
inline std::uint64_t take_sequence_number() {
  return at::sequence_number::get_and_increment();
}

}  // namespace tessera::detail
TESSERA_API_END
