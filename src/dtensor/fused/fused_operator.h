// Code shared by all operators in src/dtensor/fused. Each operator has a FusedOperator (name and
// schema), a kernel, a sharding rule and an autograd node. Its backward is another FusedOperator.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "dispatch/unboxed_kernel.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

using OptionalTensor = std::optional<at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline OptionalTensor optional_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

/// Calls an operator of this library, like the structs in at::_ops. `Op` has a `name`
/// ("tessera::silu_mul") and a `signature` ("(Tensor gate, Tensor up) -> Tensor").
template <class Op, class Schema>
class FusedOperator;

template <class Op, class Result, class... Arguments>
class FusedOperator<Op, Result(Arguments...)> {
 public:
  using schema = Result(Arguments...);
  static constexpr const char* overload_name = "";

  static Result call(Arguments... arguments) { return handle().call(arguments...); }
  /// Calls the operator without autograd; used in the operator's own autograd kernel.
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

/// Registers an operator. `kernel` runs on local tensors on every device, including meta.
/// `differentiable` is the autograd kernel; nullptr: a backward through the operator throws.
/// `reads_numbers`: see register_rule.
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

/// The autograd node of a fused operator. Differentiable once.
class FusedNode : public Node {
 public:
  variable_list apply(variable_list&& gradients) override;
  void release_variables() final;
  std::string name() const final { return name_; }

  template <class... Tensors>
  void save(const Tensors&... tensors) {
    (saved_.emplace_back(tensors, /*is_output=*/false), ...);
  }
  void save_result(const at::Tensor& result) { saved_.emplace_back(result, /*is_output=*/true); }
  /// Makes this node the grad_fn of `result`, so that backward gets the gradient of `result`.
  void record(const at::Tensor& result);
  at::Tensor saved(std::size_t i) { return saved_[i].unpack(pointer_to(*this)); }

 protected:
  /// String literals: `op` is the operator's name for messages, `name` is the node's name.
  FusedNode(const char* op, const char* name) : op_(op), name_(name) {}

  /// Computes the gradients of the inputs from the gradients of the recorded results. At least one
  /// of `gradients` is defined. Each defined gradient has the layout of its result.
  virtual variable_list differentiate(const variable_list& gradients) = 0;
  bool is_distributed() const { return results_.front() != nullptr; }
  /// Whether `tensor` has the layout of the operator's first result.
  bool fits_result(const at::Tensor& tensor) const;

 private:
  at::Tensor in_layout_of_result(const at::Tensor& gradient, std::size_t result) const;

  const char* op_;
  const char* name_;
  c10::SmallVector<SavedVariable, 4> saved_;
  c10::SmallVector<TensorSpecPtr, 1> results_;  ///< spec of each result; nullptr: plain
};

/// The autograd node of an operator whose first result is not saved for backward. Other nodes save
/// a KeptTensor, which asks this node to recompute the result.
class RecomputableNode : public FusedNode {
 public:
  /// Whether `tensor` can be recomputed: whether `tensor` is the first result of this node and has
  /// not been written in place since.
  bool can_recompute(const at::Tensor& tensor);
  /// Returns the recomputed first result. The result is cached until this node runs or the backward
  /// ends. Nodes that need the result run before this node.
  at::Tensor recompute() { return recompute_for({}); }
  /// Whether compute_with() is implemented, which also computes the gradients of the inputs.
  virtual bool takes_gradient() const { return false; }
  /// Like recompute(), but also computes the gradients of the inputs from `gradient`, the gradient
  /// of the result. This node returns these gradients if it later gets the same `gradient`.
  at::Tensor recompute_for(const at::Tensor& gradient);
  variable_list apply(variable_list&& gradients) final;

  /// Like record(), for the first result. `inputs`: the inputs of compute(). If an input does not
  /// have the result's layout, can_recompute() returns false: a recomputation would communicate.
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

  virtual bool prepare() { return true; }
  /// Computes the operator's first result. With create_graph, uses operators that autograd records.
  virtual at::Tensor compute() = 0;
  /// Computes the operator's first result, and the gradients of the inputs for `gradient`, which
  /// has the layout of the result (see fits_result).
  virtual WithGradients compute_with(const at::Tensor& /*gradient*/) { return {compute(), {}}; }

 private:
  struct Recomputed {
    /// id of the backward that has the result in its cache; -1 after the end of this backward
    int backward = -1;
    at::Tensor result;
    variable_list gradients = {};  ///< gradients of the inputs
    at::Tensor gradient = {};  ///< the result's gradient, from which backward computed `gradients`
    std::uint32_t writes = 0;  ///< version counter of `gradient` when `gradients` were computed
  };
  Recomputed compute_for(const at::Tensor& gradient, int backward);

  std::uint32_t writes_ = 0;  ///< version counter of the first result when the operator returned it
  bool moves_ = false;
  std::shared_ptr<Recomputed> recomputed_;
};

/// Makes the autograd node of an operator call with `inputs`; nullptr if no gradient is needed.
template <class NodeOfOperator, class... Tensors>
NodePtr<NodeOfOperator> node_for(const Tensors&... inputs) {
  if (!is_recorded(inputs...)) {
    return nullptr;
  }
  auto node = make_node<NodeOfOperator>();
  set_inputs(*node, inputs...);
  return node;
}

/// The autograd node of an operator whose gradients the function `Formula` computes: the arguments
/// of `Formula` are the node and the gradients of the results.
template <class Formula>
class FormulaNode final : public FusedNode {
 public:
  FormulaNode(const char* op, const char* name, Formula formula)
      : FusedNode(op, name), formula_(std::move(formula)) {}

 private:
  variable_list differentiate(const variable_list& gradients) override {
    return formula_(*this, gradients);
  }

  Formula formula_;
};

template <class Formula, class... Tensors>
NodePtr<FormulaNode<Formula>> formula_node(const char* op, const char* name, Formula formula,
                                           const Tensors&... inputs) {
  if (!is_recorded(inputs...)) {
    return nullptr;
  }
  auto node = make_node<FormulaNode<Formula>>(op, name, std::move(formula));
  set_inputs(*node, inputs...);
  return node;
}

template <class NodeOfOperator>
at::Tensor recorded(const NodePtr<NodeOfOperator>& node, at::Tensor result) {
  if (node != nullptr) {
    node->record(result);
  }
  return result;
}

/// The sharding rule of an elementwise operator, whose tensors all have equal sizes.
RuleFunction::Body elementwise_rule(std::size_t results);

}  // namespace tessera::detail
