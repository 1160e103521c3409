// How a call will be run.
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

/// How a call is run. Decided by plan_call from the call's key; the switch in fallback.cpp runs it.
enum class CallKind : std::uint8_t {
  kPlain,          ///< nothing is distributed: the operator itself, below our key
  kDecomposed,     ///< the operator is written in terms of others; each is dispatched
  kDirect,         ///< the operator on the local tensors, the results wrapped: nothing else
  kLocal,          ///< the same, with arguments redistributed or rewritten and writes brought back
  kFailTogether,   ///< kLocal; if it throws on one rank, all throw
  kAgreed,         ///< kLocal; then ranks ask each other whether it threw: if so, it runs gathered
  kLowering,       ///< another way to run the operator, which sends less (lowering.h)
  kRandomInplace,  ///< random numbers by the global element, into the tensor
  kNativeDropout,  ///< the same for dropout
  // These depend on properties that are in no key: whether arguments are the same tensor, and
  // whether their gradients are required. At each call these decide between the kind here and
  // CallPlan::otherwise.
  kForeach,        ///< position by position, if one writes what another one uses
  kBackwardZeros,  ///< the functional form, if backward has just made the zeros that are written
  kNewZeros,       ///< always `otherwise`; then notes the zeros, if inside backward
  kRecorded,       ///< autograd records the kernel on local tensors, if it has not the operator
};

/// How one operator runs on this rank for inputs with certain specs: all that the next such call
/// can reuse. plan_call makes it, and the CallCache of a thread stores it. The first call adds what
/// only a kernel shows (Output::spec).
struct CallPlan {
  /// One for each defined tensor among the arguments.
  struct Input {
    TensorSpecPtr spec;          ///< its own spec (a plain tensor: replicated)
    LayoutPtr target = nullptr;  ///< the layout to bring it to; nullptr: its own
    RedistributionPlanPtr plan;  ///< to `target`
    /// If the operator leaves a new value that must be copied to the tensor: the layout of that
    /// value. Else nullptr.
    LayoutPtr written = nullptr;
    bool updated = false;   ///< written, though the schema does not say so: running statistics
    bool detached = false;  ///< a view that holds a copy (distributed_impl.h)
    /// For kRecorded: the layout of the gradient that autograd finds for the local tensor.
    LayoutPtr gradient = nullptr;

    LayoutPtr layout() const { return target != nullptr ? target : spec->sharding.layout; }
  };
  /// One for each result, lists flattened.
  struct Output {
    LayoutPtr layout = nullptr;
    std::vector<std::int64_t> sizes;                   ///< negative: filled by the first call
    std::optional<std::vector<std::int64_t>> strides;  ///< a view's, known beforehand
    TensorSpecPtr spec;                                ///< filled by the first call
    bool contiguous = false;  ///< local results are made so: ranks would not agree on strides
  };
  /// Run instead of the operator.
  struct LocalCall {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    double scale = 1.0;  ///< its results are multiplied by it
  };

  /// An argument with global sizes, and its local value.
  struct Rewritten {
    int argument;
    c10::IValue value;
    std::optional<std::vector<std::int64_t>> sizes;  ///< the value, of a list
  };

  // Read by the steps of a run. `kind` is decided last, from all other members.
  CallKind kind = CallKind::kLocal;
  CallKind otherwise = CallKind::kLocal;  ///< the kind that `kind` falls back to
  ShardingSpec replicated;  ///< the mesh, and the layout of outputs where there is no rule
  bool has_rule = false;
  bool seeded = false;          ///< draws from a generator that all ranks seed alike
  bool moves = false;           ///< data travel that the call does not ask for
  bool asked_for = false;       ///< what moves is one value that the caller asks for
  bool takes_plain = false;     ///< a plain tensor takes part that is no wrapped number
  bool mixes_plain = false;     ///< one of more than one element
  bool compares_plain = false;  ///< ranks always compare those first (TESSERA_DEBUG)
  std::vector<Input> inputs;    ///< every defined tensor, in schema order
  std::vector<Output> outputs;  ///< as ShardingRule::outputs
  std::vector<Rewritten> rewritten;
  std::optional<LocalCall> local_call;
  const Lowering* lowering =
      nullptr;  ///< for kLowering; of the rest only the mesh and the flags count then
};

/// A planned call: the stack holds its arguments, which its results replace.
struct PlannedCall {
  PlannedCall(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
              torch::jit::Stack& stack)
      : op(op), info(info), plan(plan), stack(stack), first(stack.size() - info.arguments.size()) {}

  // References: a planned call ends before the dispatch() that made it.
  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  CallPlan& plan;
  torch::jit::Stack& stack;
  const std::size_t first;  ///< where on the stack the arguments begin

  c10::IValue& argument(int i) const { return stack[first + static_cast<std::size_t>(i)]; }
  std::span<c10::IValue> arguments() const { return std::span(stack).subspan(first); }
  /// Replaces the arguments on the stack by `results`.
  void return_results(std::initializer_list<c10::IValue> results) const {
    stack.resize(first);
    stack.insert(stack.end(), results);
  }
};

/// Decides how to run the call. Not collective: every rank makes the same decision, or throws the
/// same Error, from data that all of them have.
CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info,
                   std::span<const c10::IValue> arguments);

/// Throws Error, on all ranks, where the scopes of this thread (strict_scope.h), which are in no
/// key, do not allow what the plan does. Otherwise warns once of an operator without a rule, and
/// makes the gradients of plain tensors among the arguments plain. Plain tensors that are not known
/// to be the same on every rank are compared, if the call may take them.
void check_policy(const PlannedCall& call);

/// For an operator that gathers its inputs without a plan: what check_policy does for one with a
/// plan that has no rule. Not collective.
void check_gather(const std::string& name, const std::vector<at::Tensor>& tensors);

/// Throws Error, on all ranks, unless the plain ones among `tensors`, which operator `what` reads,
/// are equal on the ranks of the mesh. Numbers that a program writes as such (2.0) are. Collective,
/// between the hosts, if there is any to compare.
void compare_plain(const DeviceMesh& mesh, std::string_view what, std::vector<at::Tensor> tensors);

/// What to do if one of `tensors` is a parameter that is used although the hooks of its module have
/// not run; empty if none is a distributed parameter. For messages.
std::string remedy_of_calling(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

/// The rule of the call's operator, without what the types and numbers of this call do not allow:
/// reductions that a type lacks, and sums that would be rounded term by term or scaled to infinity.
/// nullopt if no rule covers the call. A pure function of the call's key.
std::optional<ShardingRule> rule_of_call(const OperatorInfo& info, const BoundCall& bound,
                                         std::span<const c10::IValue> arguments);

/// The strides of each result of a view operator on whole tensors; nullopt: unknown.
using GlobalStrides = std::optional<std::vector<std::vector<std::int64_t>>>;

/// Plans the call by its rule: the layouts of the inputs, the local call and the layouts of the
/// results.
void plan_by_rule(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                  const BoundCall& bound, std::span<const c10::IValue> arguments,
                  GlobalStrides view_strides);

// For any plan.

/// The tensors, by their numbers in `bound`, of the arguments that the operator writes to.
std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound);

/// Plans the redistribution of an input to `target`; nullptr: none.
void bring_to(CallPlan& plan, CallPlan::Input& input, LayoutPtr target);

/// Finds the written tensors whose value must be copied to them.
void plan_writes(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound,
                 std::span<const ShardingRule::Inplace> inplace);

}  // namespace tessera::detail
