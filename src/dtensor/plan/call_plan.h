// The plan of an operator call: how the dispatcher runs it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lowerings/lowering.h"
#include "operators/bound_call.h"
#include "operators/operator_info.h"
#include "redistribute/redistribute.h"
#include "tensor/tensor_spec.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// How a call is run: chosen by plan_call, and run by the switch in fallback.cpp.
enum class CallKind : std::uint8_t {
  kPlain,          ///< no argument is distributed: runs the operator itself, below our key
  kDecomposed,     ///< the operator is composed of others; each is dispatched
  kDirect,         ///< runs the operator on the local tensors and wraps the results; nothing else
  kLocal,          ///< kDirect, with arguments redistributed or rewritten and written values copied
                   ///< back
  kFailTogether,   ///< kLocal; if it throws on one rank, all ranks throw
  kAgreed,         ///< kLocal, then the ranks exchange whether it threw; if so, the call runs on
                   ///< gathered tensors
  kLowering,       ///< runs a lowering, which sends less (lowering.h)
  kRandomInplace,  ///< writes random numbers into the tensor, by global element
  kNativeDropout,  ///< dropout by global element
  // The following kinds depend on properties that are in no cache key: whether arguments are the
  // same tensor, and whether their gradients are required. At each call these properties select
  // either this kind or CallPlan::otherwise.
  kForeach,        ///< runs position by position, if one position writes what another uses
  kBackwardZeros,  ///< runs the functional form, if the call writes to zeros that backward has just
                   ///< made
  kNewZeros,       ///< always runs `otherwise`; inside backward also records the zeros
  kRecorded,       ///< autograd records the kernel on local tensors, if it does not know the
                   ///< operator
};

/// How one operator runs on this rank for inputs with certain specs: all data that the next such
/// call can reuse. plan_call makes it, and a thread's CallCache stores it. The first call adds the
/// properties that only a kernel determines (Output::spec).
struct CallPlan {
  /// The plan for one tensor argument; one for each defined tensor.
  struct Input {
    TensorSpecPtr spec;          ///< the tensor's own spec (replicated for a plain tensor)
    LayoutPtr target = nullptr;  ///< the layout to redistribute the tensor to; nullptr: its own
    RedistributionPlanPtr plan;  ///< the redistribution to `target`
    /// The layout of a new value that must be copied to the tensor; nullptr: none.
    LayoutPtr written = nullptr;
    bool updated = false;   ///< written although the schema does not declare it: running statistics
    bool detached = false;  ///< whether the tensor is a view that has its own copy
                            ///< (distributed_impl.h)
    /// For kRecorded: the layout of the gradient that autograd computes for the local tensor.
    LayoutPtr gradient = nullptr;

    LayoutPtr layout() const { return target != nullptr ? target : spec->sharding.layout; }
  };
  /// The plan for one result; lists are flattened.
  struct Output {
    LayoutPtr layout = nullptr;
    std::vector<std::int64_t> sizes;                   ///< global sizes; negative ones are set by
                                                       ///< the first call
    std::optional<std::vector<std::int64_t>> strides;  ///< strides of a view, which are known
                                                       ///< before the call
    TensorSpecPtr spec;                                ///< the result's spec; set by the first call
    bool contiguous = false;  ///< local results are made contiguous, because ranks would not agree
                              ///< on strides
  };
  /// An operator call that runs instead of the called operator.
  struct LocalCall {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    double scale = 1.0;  ///< factor for the local call's results
  };

  /// An argument with global sizes, and its local value.
  struct Rewritten {
    int argument;
    c10::IValue value;
    std::optional<std::vector<std::int64_t>> sizes;  ///< the value as a list of integers, if it is
                                                     ///< one
  };

  // Read by the steps of a run. `kind` is set last, from all other members.
  CallKind kind = CallKind::kLocal;
  CallKind otherwise = CallKind::kLocal;  ///< the kind that `kind` falls back to
  ShardingSpec replicated;  ///< the mesh, and the layout of outputs of an operator without a rule
  bool has_rule = false;
  bool seeded = false;          ///< draws from a generator that all ranks seed equally
  bool moves = false;           ///< moves data that the caller has not requested
  bool asked_for = false;       ///< the moved data is a single value that the caller requested
                                ///< explicitly
  bool takes_plain = false;     ///< has a plain tensor argument that is not a wrapped number
  bool mixes_plain = false;     ///< a plain tensor argument has more than one element
  bool compares_plain = false;  ///< ranks always compare the plain tensors first (TESSERA_DEBUG)
  std::vector<Input> inputs;    ///< one for every defined tensor argument, in schema order
  std::vector<Output> outputs;  ///< one for each result, in the order of ShardingRule::outputs
  std::vector<Rewritten> rewritten;
  std::optional<LocalCall> local_call;
  const Lowering* lowering = nullptr;  ///< the lowering for kLowering; then only the mesh and the
                                       ///< flags of the plan are used
};

/// A planned call. The stack contains its arguments; its results replace them.
struct PlannedCall {
  PlannedCall(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
              torch::jit::Stack& stack)
      : op(op), info(info), plan(plan), stack(stack), first(stack.size() - info.arguments.size()) {}

  // References, because a planned call ends before the dispatch() that made it.
  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  CallPlan& plan;
  torch::jit::Stack& stack;
  const std::size_t first;  ///< index of the first argument on the stack

  c10::IValue& argument(int i) const { return stack[first + static_cast<std::size_t>(i)]; }
  std::span<c10::IValue> arguments() const { return std::span(stack).subspan(first); }
  /// Replaces the arguments on the stack by `results`.
  void return_results(std::initializer_list<c10::IValue> results) const {
    stack.resize(first);
    stack.insert(stack.end(), results);
  }
};

/// Not collective: every rank makes the same decision, or throws the same Error.
CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info,
                   std::span<const c10::IValue> arguments);

/// Throws Error, on all ranks, if the scopes of this thread (strict_scope.h), which are in no cache
/// key, do not permit the plan. Otherwise warns once about an operator without a rule, and installs
/// the hooks that make gradients of plain tensor arguments plain. Plain tensors that are permitted
/// but not known to be the same on every rank are compared.
void check_policy(const PlannedCall& call);

/// check_policy for an operator that gathers its inputs without a plan. Not collective.
void check_gather(const std::string& name, const std::vector<at::Tensor>& tensors);

/// Throws Error, on all ranks, unless the plain tensors among `tensors`, the arguments of operator
/// `what`, are equal on the ranks of the mesh. Number literals (2.0) are not compared. Collective,
/// between the hosts, if there is a tensor to compare.
void compare_plain(const DeviceMesh& mesh, std::string_view what, std::vector<at::Tensor> tensors);

/// Advice for messages, if one of `tensors` is a distributed parameter that is used although the
/// hooks of its module have not run; otherwise empty.
std::string remedy_of_calling(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

/// The rule of the call's operator, restricted by the types and numbers of this call. Removed are
/// reductions that a type does not support, and sums that would be rounded term by term or scaled
/// to infinity. nullopt if no rule covers the call. A pure function of the call's cache key.
std::optional<ShardingRule> rule_of_call(const OperatorInfo& info, const BoundCall& bound,
                                         std::span<const c10::IValue> arguments);

/// The strides of each result of a view operator on whole tensors; nullopt: unknown.
using GlobalStrides = std::optional<std::vector<std::vector<std::int64_t>>>;

/// Plans the layouts of the inputs, the local call and the layouts of the results.
void plan_by_rule(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                  const BoundCall& bound, std::span<const c10::IValue> arguments,
                  GlobalStrides view_strides);

// Used for every plan, with or without a rule:

/// The tensors, by their numbers in `bound`, that the operator writes to.
std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound);

/// Plans the redistribution of an input to `target`; nullptr: none.
void bring_to(CallPlan& plan, CallPlan::Input& input, LayoutPtr target);

/// Finds the written tensors whose new value must be copied to them.
void plan_writes(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound,
                 std::span<const ShardingRule::Inplace> inplace);

}  // namespace tessera::detail
