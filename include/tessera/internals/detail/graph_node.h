// Nodes of autograd's graph, as our own functions make them. libtorch gives users one way to add a
// function to the graph, torch::autograd::Function, whose node keeps its values in a dictionary and
// unpacks them one by one; the nodes below are members of a class, as libtorch's own.
//
// To 2.12 nodes are held by std::shared_ptr, and freed by deleteNode so that a long chain of nodes
// that free each other does not overflow the stack. From 2.13 they are held by c10::intrusive_ptr,
// which sees to that itself.
//
// Canary: GraphNodeCanary.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <memory>
#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

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

/// Whether autograd is to record a function of these tensors.
template <class... Tensors>
bool is_recorded(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...);
}

/// The edges of a node from whose backward gradients go to these tensors, or to a list of them.
template <class... Tensors>
void set_inputs(Node& node, const Tensors&... inputs) {
  node.set_next_edges(torch::autograd::collect_next_edges(inputs...));
}

/// Where the gradient of `tensor` goes.
inline Edge edge_to(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

/// `output` is what the function has given, whose backward is `node`.
inline void set_node(const at::Tensor& output, const NodePtr<Node>& node) {
  torch::autograd::set_history(output, node);
}

}  // namespace tessera::detail
TESSERA_API_END
