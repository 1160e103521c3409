// Nodes of autograd's graph.
#pragma once

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
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

// Nodes of autograd's graph for this library's functions. The public way to add a function to the
// graph is torch::autograd::Function, whose node stores its values in a dictionary. The nodes below
// store their values as members, as libtorch's own nodes do.
//
// Up to 2.12 nodes are owned by std::shared_ptr and freed by deleteNode, so that a long chain of
// nodes that free each other does not overflow the stack. From 2.13 they are owned by
// c10::intrusive_ptr, which handles long chains itself.
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

/// An owning pointer to a node that something else owns already.
inline NodePtr<Node> pointer_to(Node& node) {
  return node.shared_from_this();
}

/// `node` as a T, or nullptr if the node has another class.
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

/// An owning pointer to a node that something else owns already.
inline NodePtr<Node> pointer_to(Node& node) {
  return NodePtr<Node>::unsafe_reclaim_from_nonowning(&node);
}

/// `node` as a T, or nullptr if the node has another class.
template <class T>
NodePtr<T> node_cast(const NodePtr<Node>& node) {
  auto* found = dynamic_cast<T*>(node.get());
  return found == nullptr ? NodePtr<T>() : NodePtr<T>::unsafe_reclaim_from_nonowning(found);
}

#endif

/// Whether autograd must record a function whose arguments are these tensors.
template <class... Tensors>
bool is_recorded(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...);
}

/// Sets the edges of a node whose backward sends gradients to the given tensors, or to a list of
/// tensors.
template <class... Tensors>
void set_inputs(Node& node, const Tensors&... inputs) {
  node.set_next_edges(torch::autograd::collect_next_edges(inputs...));
}

/// The edge that receives the gradient of `tensor`.
inline Edge edge_to(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

/// Makes `node` the backward of `output`.
inline void set_node(const at::Tensor& output, const NodePtr<Node>& node) {
  torch::autograd::set_history(output, node);
}

// A tensor that a node of autograd's graph saves for backward. Such a tensor may be a result of the
// node without a reference cycle, later writes to it are detected, and saved-tensor hooks apply to
// it. torch::autograd::Function stores such tensors in a list; the library's nodes have them as
// members.
//
// Up to 2.12 unpack() takes the node as shared_ptr, from 2.13 as intrusive_ptr; pointer_to() of a
// GraphNode gives the right one.
//
// Canary: SavedTensorCanary.

using torch::autograd::SavedVariable;

/// The interface of hooks that save one tensor in another form; see EngineAnswers.
using torch::autograd::SavedVariableHooks;

/// Whether saved-tensor hooks are active for nodes that this thread makes now.
bool hooks_keep_tensors();

// The node of a leaf in autograd's graph, which adds a gradient to the `.grad` of the leaf. Another
// node may add to `.grad` itself, under the lock of the leaf's node (OpenGradient). The node of a
// leaf may also be replaced: autograd then finds the gradient of a parameter for which the graph
// contains another tensor. There is no public way to get or set this node.
//
// Up to 2.12 the node is owned by shared_ptr, from 2.13 by intrusive_ptr. libtorch itself
// has only a weak pointer to the node, and makes a node if there is none.
//
// Canary: LeafNodeCanary.

/// libtorch's node of a leaf; its member `variable` is the leaf.
using LeafNode = torch::autograd::AccumulateGrad;

inline LeafNode* as_leaf(const Edge& edge) {
  return dynamic_cast<LeafNode*>(edge.function.get());
}

/// Whether the edge leads to the node that libtorch uses, in a grad() call, for an input that the
/// graph does not contain.
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
/// result directly and return an undefined gradient. While this object exists, it holds the lock of
/// the leaf's node.
class OpenGradient {
 public:
  /// `node` runs on this thread, and returns a gradient for `edge`. tensor() is undefined if other
  /// code could see that gradient. This is so if the backward returns gradients or is recorded, if
  /// `edge` leads to no leaf, or if the leaf has no `.grad`, has hooks of the program, or belongs
  /// to another stream.
  OpenGradient(Node& node, const Edge& edge);
  /// The leaf's `.grad`; undefined if the node must not add to it.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  std::unique_lock<std::mutex> lock_;
  at::Tensor tensor_;
};

/// Replaces the node of a leaf. The caller must keep `node` alive.
inline void set_leaf_node(const at::Tensor& leaf, const NodePtr<Node>& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, WeakNodePtr(node));
}

// The sequence numbers of the nodes of autograd's graph. The engine first runs the ready node with
// the highest number.
//
// Canary: SequenceNumberCanary.

/// Reserves the sequence number of the node that this thread would make next: no other node gets
/// the number.
inline std::uint64_t take_sequence_number() {
  return at::sequence_number::get_and_increment();
}

// Autograd's engine with two functions of this library. One chooses the hooks for a tensor that is
// saved for backward: libtorch's stack of saved-tensor hooks accepts only Python objects, and in
// C++ libtorch calls the engine instead. The other finds the gradient of a parameter for which the
// graph contains another tensor.
//
// set_default_engine_stub, which libtorch uses for Python's engine, replaces the process's engine.
//
// Canary: EngineCanary.

/// A call of libtorch's engine: what to compute (see torch::autograd::Engine::execute).
struct BackwardCall {
  edge_list roots;
  variable_list gradients;
  bool keep_graph = false;
  bool create_graph = false;
  /// whether gradients are added to the `.grad` of `outputs`; if false, the gradients are returned
  bool accumulate = false;
  /// Edges whose gradients are computed; empty for a whole backward, into all leaves.
  edge_list outputs;
};
using RunBackward = std::function<variable_list(const BackwardCall&)>;

struct EngineAnswers {
  /// Returns the hooks for the next tensor that autograd saves on this thread; nullptr: the tensor
  /// is saved unchanged.
  std::unique_ptr<SavedVariableHooks> (*hooks)();
  /// Computes a call for given outputs by one or more calls of libtorch's engine.
  variable_list (*execute)(const BackwardCall& call, const RunBackward& run);
};

/// libtorch's engine with the two functions of EngineAnswers. A test derives from it.
class AnsweringEngine : public torch::autograd::Engine {
 public:
  AnsweringEngine() = default;
  AnsweringEngine(const AnsweringEngine&) = delete;
  AnsweringEngine& operator=(const AnsweringEngine&) = delete;
  ~AnsweringEngine() override { stop(); }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override;
  variable_list execute(const edge_list& roots, const variable_list& gradients, bool keep_graph,
                        bool create_graph, bool accumulate, const edge_list& outputs) override;
};

/// Installs the given functions in the engine of the process; only the first call has an effect.
/// Returns false if the process has an engine that is neither libtorch's own nor an AnsweringEngine
/// (for example Python's): replacing it would break its users.
bool install_engine(const EngineAnswers& answers);

}  // namespace tessera::detail
TESSERA_API_END
