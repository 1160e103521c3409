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

// Nodes of autograd's graph for Tessera's functions. These nodes store saved values in data
// members; the public torch::autograd::Function uses a slow dictionary.
//
// Up to libtorch 2.12 std::shared_ptr owns nodes, and deleteNode prevents a stack overflow when a
// long chain is freed. From 2.13 c10::intrusive_ptr owns nodes.
//
// Canary: GraphNodeCanary, a test of libtorch itself.

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

inline NodePtr<Node> pointer_to(Node& node) {
  return node.shared_from_this();
}

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

inline NodePtr<Node> pointer_to(Node& node) {
  return NodePtr<Node>::unsafe_reclaim_from_nonowning(&node);
}

template <class T>
NodePtr<T> node_cast(const NodePtr<Node>& node) {
  auto* found = dynamic_cast<T*>(node.get());
  return found == nullptr ? NodePtr<T>() : NodePtr<T>::unsafe_reclaim_from_nonowning(found);
}

#endif

/// Whether gradient mode is on and an input requires a gradient, so that autograd must record.
template <class... Tensors>
bool is_recorded(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...);
}

/// Sets the edges of a node. In backward the node sends gradients to the given tensors (or lists of
/// tensors).
template <class... Tensors>
void set_inputs(Node& node, const Tensors&... inputs) {
  node.set_next_edges(torch::autograd::collect_next_edges(inputs...));
}

/// Returns the edge of autograd's graph that receives the gradient of `tensor`.
inline Edge edge_to(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

inline void set_node(const at::Tensor& output, const NodePtr<Node>& node) {
  torch::autograd::set_history(output, node);
}

// SavedVariable is a tensor that a node saves for backward. SavedVariable detects writes and
// applies saved-tensor hooks. A node may save its own result without a reference cycle. The public
// torch::autograd::Function saves tensors only in a list.
//
// pointer_to() returns the node pointer for unpack(): shared_ptr up to libtorch 2.12, intrusive_ptr
// from 2.13.
//
// Canary: SavedTensorCanary, a test of libtorch itself.

using torch::autograd::SavedVariable;

/// Saved-tensor hooks of one tensor: pack and unpack, as in torch.autograd.graph.
using torch::autograd::SavedVariableHooks;

/// Whether saved-tensor hooks are active for nodes that this thread makes now.
bool hooks_keep_tensors();

// The graph node of a leaf tensor (AccumulateGrad), which adds a gradient to `.grad`. libtorch has
// no public access. FSDP replaces a parameter's node, because the graph has only the gathered
// tensor.
//
// The leaf has a weak pointer to its node. Up to libtorch 2.12 shared_ptr owns the node, from 2.13
// intrusive_ptr.
//
// Canary: LeafNodeCanary, a test of libtorch itself.

/// The node AccumulateGrad of a leaf. The member `variable` is the leaf.
using LeafNode = torch::autograd::AccumulateGrad;

inline LeafNode* as_leaf(const Edge& edge) {
  return dynamic_cast<LeafNode*>(edge.function.get());
}

/// Whether the edge leads to the placeholder node that torch::autograd::grad() makes for an input
/// that the graph lacks.
inline bool is_unreachable(const Edge& edge) {
  return dynamic_cast<const torch::autograd::Identity*>(edge.function.get()) != nullptr;
}

/// Returns the AccumulateGrad node of a leaf that requires a gradient.
inline NodePtr<Node> leaf_node(const at::Tensor& leaf) {
  return torch::autograd::impl::grad_accumulator(leaf);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using WeakNodePtr = std::weak_ptr<Node>;
#else
using WeakNodePtr = c10::weak_intrusive_ptr<Node>;
#endif

/// Lets a node add a gradient directly to the leaf's `.grad`. The node must then return an
/// undefined gradient, so that autograd adds nothing. If tensor() is defined, the OpenGradient
/// locks the leaf's node.
class OpenGradient {
 public:
  /// `node`, which runs on this thread, returns a gradient for `edge`. tensor() is undefined for
  /// create_graph, `inputs` and torch::autograd::grad(). tensor() is also undefined if the leaf of
  /// `edge` has no `.grad`, has hooks of the program, or uses another stream.
  OpenGradient(Node& node, const Edge& edge);
  /// Returns `.grad` of the leaf; an undefined tensor if the node must not add to `.grad`.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  std::unique_lock<std::mutex> lock_;
  at::Tensor tensor_;
};

/// Replaces the AccumulateGrad node of a leaf. The caller must keep `node` alive.
inline void set_leaf_node(const at::Tensor& leaf, const NodePtr<Node>& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, WeakNodePtr(node));
}

// The sequence numbers of the nodes of autograd's graph. The engine first runs the ready node with
// the highest number.
//
// Canary: SequenceNumberCanary, a test of libtorch itself.

/// Reserves this thread's next sequence number for a node that is made later.
inline std::uint64_t take_sequence_number() {
  return at::sequence_number::get_and_increment();
}

// install_engine() replaces autograd's engine by a derived engine that calls two functions of
// Tessera. One chooses saved-tensor hooks, because libtorch's hook stack accepts only Python
// objects. The other computes the gradient of an FSDP parameter, because the graph has only the
// gathered tensor. set_default_engine_stub is the function by which libtorch installs Python's
// engine.
//
// Canary: EngineCanary, a test of libtorch itself.

/// The arguments of a call of torch::autograd::Engine::execute().
struct BackwardCall {
  edge_list roots;
  variable_list gradients;
  bool keep_graph = false;
  bool create_graph = false;
  /// Whether gradients are added to `.grad` of leaves; if false, gradients are returned.
  bool accumulate = false;
  /// The edges whose gradients are computed; empty to compute the gradients of all leaves.
  edge_list outputs;
};
using RunBackward = std::function<variable_list(const BackwardCall&)>;

struct EngineAnswers {
  /// Returns the saved-tensor hooks for the next tensor that autograd saves on this thread, or
  /// nullptr to save the tensor without hooks.
  std::unique_ptr<SavedVariableHooks> (*hooks)();
  /// Runs a backward for which `call.outputs` is not empty. May call `run`, libtorch's engine,
  /// several times.
  variable_list (*execute)(const BackwardCall& call, const RunBackward& run);
};

/// libtorch's autograd engine. Two overridden functions call `hooks` and `execute` of the installed
/// EngineAnswers. A test derives from this class.
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

/// Makes an AnsweringEngine the engine of the process; only the first call has an effect. Returns
/// false if another library (for example Python's) has replaced libtorch's engine.
bool install_engine(const EngineAnswers& answers);

}  // namespace tessera::detail
TESSERA_API_END
