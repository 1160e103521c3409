// Shared by the operators of this folder. Each is defined in one file, by a FusedOperator for its
// name and schema, a kernel, a rule and a node for its gradient; its backward is an operator too.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "dispatch/unboxed_kernel.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/register_rule.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// Calls of an operator of this library, as at::_ops has those of libtorch's. `Op` derives from it
/// and has a `name`, "tessera::silu_mul", and a `signature`, "(Tensor gate, Tensor up) -> Tensor".
template <class Op, class Schema>
class FusedOperator;

template <class Op, class Result, class... Arguments>
class FusedOperator<Op, Result(Arguments...)> {
 public:
  using schema = Result(Arguments...);
  static constexpr const char* overload_name = "";

  static Result call(Arguments... arguments) { return handle().call(arguments...); }
  /// For autograd kernels, which run below autograd's keys.
  static Result call_below_autograd(Arguments... arguments) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return handle().call(arguments...);
  }
  static Result redispatch(c10::DispatchKeySet keys, Arguments... arguments) {
    return handle().redispatch(keys, arguments...);
  }

 private:
  static const c10::TypedOperatorHandle<schema>& handle() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, "").template typed<schema>();
    return op;
  }
};

/// Defines an operator: `kernel` is for local tensors of every device, without values too, and
/// `differentiable` for autograd; nullptr: a gradient of the operator is refused. `reads_numbers`:
/// as of register_rule.
template <class Op>
void define(torch::Library& library, typename Op::schema* kernel, RuleFunction::Body rule,
            typename Op::schema* differentiable = nullptr, bool reads_numbers = false) {
  using c10::DispatchKey;
  library.def((std::string(Op::name) + Op::signature).c_str());
  library.impl(Op::name, torch::dispatch(DispatchKey::CompositeExplicitAutograd, kernel));
  library.impl(Op::name, torch::dispatch(kDistributedKey, UnboxedKernel<Op>::function()));
  library.impl(Op::name,
               torch::dispatch(DispatchKey::Autograd, differentiable != nullptr
                                                          ? torch::CppFunction(differentiable)
                                                          : refuse_gradient()));
  add_library_rule(Op::name, std::move(rule), reads_numbers);
}

/// The gradient of an operator, as autograd records it. Differentiable once.
class FusedNode : public Node {
 public:
  variable_list apply(variable_list&& gradients) override;
  void release_variables() final;
  std::string name() const final { return name_; }

  template <class... Tensors>
  void save(const Tensors&... tensors) {
    (saved_.emplace_back(tensors, /*is_output=*/false), ...);
  }
  /// A result that was recorded, after what was saved before.
  void save_result(const at::Tensor& result) { saved_.emplace_back(result, /*is_output=*/true); }
  /// `result`, as one whose gradient the node takes, after those recorded before.
  void record(const at::Tensor& result);

 protected:
  /// Literals: of the operator, for messages, and of the node.
  FusedNode(const char* op, const char* name) : op_(op), name_(name) {}

  /// The gradients of the inputs of a call, from those of the results that were recorded: at least
  /// one is defined, and each that is has its result's layout.
  virtual variable_list differentiate_all(const variable_list& gradients) {
    return differentiate(gradients[0]);
  }
  /// The same for one result.
  virtual variable_list differentiate(const at::Tensor& gradient) {
    return differentiate_all({gradient});
  }
  at::Tensor saved(std::size_t i) { return saved_[i].unpack(pointer_to(*this)); }
  /// Whether the first result is.
  bool is_distributed() const { return results_.front() != nullptr; }
  /// Whether `tensor` is laid out as the first result.
  bool fits_result(const at::Tensor& tensor) const;

 private:
  at::Tensor in_layout_of_result(const at::Tensor& gradient, std::size_t result) const;

  const char* op_;
  const char* name_;
  c10::SmallVector<SavedVariable, 4> saved_;
  c10::SmallVector<TensorSpecPtr, 1> results_;  ///< nullptr: it is plain
};

/// The gradient of an operator whose first result is computed again for less than it takes to keep:
/// see KeptTensor. What the node keeps is enough for it.
class RecomputableNode : public FusedNode {
 public:
  /// `tensor` has this node, and so is a result or was, before it was written to.
  bool can_recompute(const at::Tensor& tensor);
  /// The result. Nodes that need it run before this one: computed for the first of them, and held
  /// until this one runs or the backward ends.
  at::Tensor recompute() { return recompute_for({}); }
  /// Whether there is a compute_with(): recompute_for() gives the gradients of the inputs on the
  /// way.
  virtual bool takes_gradient() const { return false; }
  /// The same for a node that has a gradient of the result: if it comes to this node as it is, by
  /// no other tensor and without a write, those of the inputs are computed already.
  at::Tensor recompute_for(const at::Tensor& gradient);
  variable_list apply(variable_list&& gradients) final;

  /// As FusedNode::record, of the first result; `inputs`: what compute() takes, all that have to be
  /// laid out as the result for nothing to move.
  template <class... Tensors>
  void record_with(const at::Tensor& result, const Tensors&... inputs) {
    record(result);
    writes_ = writes_of(result);
    moves_ = !(... && fits_result(inputs));
  }

 protected:
  using FusedNode::FusedNode;

  struct WithGradients {
    at::Tensor result;
    variable_list gradients;
  };

  /// Gets the inputs of compute() that the node does not save; false: they are not available.
  virtual bool prepare() { return true; }
  /// In a recorded backward (create_graph) by operators that autograd records.
  virtual at::Tensor compute() = 0;
  /// The same, and the gradients of the inputs for a gradient of the result with the same layout.
  virtual WithGradients compute_with(const at::Tensor& /*gradient*/) { return {compute(), {}}; }

 private:
  struct Recomputed {
    int backward = -1;  ///< -1: it has ended
    at::Tensor result;
    variable_list gradients = {};  ///< of the inputs, for:
    at::Tensor gradient = {};      ///< of the result; undefined: there are none
    std::uint32_t writes = 0;      ///< to that gradient before
  };
  Recomputed compute_for(const at::Tensor& gradient, int backward);

  std::uint32_t writes_ = 0;  ///< to the result, when it was made
  bool moves_ = false;
  std::shared_ptr<Recomputed> recomputed_;
};

/// The node of a call with these tensors; nullptr where no gradient of any is wanted.
template <class NodeOfOperator, class... Tensors>
NodePtr<NodeOfOperator> node_for(const Tensors&... inputs) {
  if (!is_recorded(inputs...)) {
    return nullptr;
  }
  auto node = make_node<NodeOfOperator>();
  set_inputs(*node, inputs...);
  return node;
}

/// The result of a call with that node.
template <class NodeOfOperator>
at::Tensor recorded(const NodePtr<NodeOfOperator>& node, at::Tensor result) {
  if (node != nullptr) {
    node->record(result);
  }
  return result;
}

/// The rule of an operator on elements: all tensors and results have the sizes of the first tensor.
RuleFunction::Body elementwise_rule(std::size_t results);

}  // namespace tessera::detail
