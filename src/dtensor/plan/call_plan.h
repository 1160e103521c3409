// The plan of an operator call describes how the dispatcher runs the call.
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
#include "operators/operator_info.h"
#include "redistribute/redistribute.h"
#include "tensor/tensor_spec.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// How an operator is run. plan_call chooses the kind, and a switch in fallback.cpp runs the call.
enum class CallKind : std::uint8_t {
  kPlain,          ///< a call without distributed arguments, run below kDistributedKey
  kDecomposed,     ///< the operators of which the operator is composed are dispatched one by one
  kDirect,         ///< the operator runs on the local tensors, and its results are wrapped
  kLocal,          ///< like kDirect, but changes arguments or copies written values back
  kFailTogether,   ///< like kLocal, but all ranks throw if the operator throws on one rank
  kLowering,       ///< a lowering (alternative implementation) runs, which sends less
  kRandomInplace,  ///< random numbers, each drawn by its element's global index, fill a tensor
  kNativeDropout,  ///< dropout runs with a mask drawn by each element's global index
};

/// A call plan: how an operator runs on this rank for inputs with certain specs. Contains all data
/// that calls with an equal cache key can reuse. plan_call makes the plan, and a thread's CallCache
/// stores it. The first call adds the properties that only a kernel determines (Output::spec).
struct CallPlan {
  /// The plan for one tensor argument. A call plan has one Input for each defined tensor.
  struct Input {
    TensorSpecPtr spec;  ///< spec of the tensor before the call; replicated for a plain tensor
    /// The layout to which the tensor is redistributed; nullptr: the tensor keeps its layout.
    LayoutPtr target = nullptr;
    RedistributionPlanPtr plan;  ///< the steps of the tensor's redistribution to `target`
    /// For a written tensor: the layout of the new value, which must be copied back; else nullptr.
    LayoutPtr written = nullptr;
    bool updated = false;   ///< whether the tensor is a running statistic that the operator writes
    bool detached = false;  ///< whether the tensor is a DetachedView (distributed_impl.h)

    LayoutPtr layout() const { return target != nullptr ? target : spec->sharding.layout; }
  };
  /// The plan for one result of the operator. Elements of a list of results have one Output each.
  struct Output {
    LayoutPtr layout = nullptr;
    std::vector<std::int64_t> sizes;  ///< global sizes of the result (negative: not yet known)
    std::optional<std::vector<std::int64_t>> strides;  ///< strides of a view, set by plan_call
    TensorSpecPtr spec;       ///< spec of the result, determined by the first call
    bool contiguous = false;  ///< whether the result must be made contiguous on all ranks
  };
  /// A call of another operator, which runs on the local tensors instead of the called operator.
  struct LocalCall {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    double scale = 1.0;  ///< the results of the local call are multiplied by `scale`
  };

  /// An argument that contains global sizes, and the local value that replaces the argument.
  struct Rewritten {
    int argument;
    c10::IValue value;
    /// The local value as a list of integers, if the value is a list.
    std::optional<std::vector<std::int64_t>> sizes;
  };

  // The members from `kind` on are read when the call runs. plan_call sets `kind` last, from all
  // other members.
  CallKind kind = CallKind::kLocal;
  ShardingSpec replicated;  ///< the mesh, and the layout of results if there is no sharding rule
  bool has_rule = false;
  bool seeded = false;  ///< whether the call draws from a generator that all ranks seed equally
  bool moves = false;   ///< whether the call moves data that the caller did not ask to move
  /// Whether the call moves only a single value that the caller requested, for example by item().
  bool asked_for = false;
  bool takes_plain = false;  ///< whether an argument is a plain tensor other than a wrapped number
  bool mixes_plain = false;  ///< whether an argument is a plain tensor with more than one element
  /// Whether ranks always compare plain tensor arguments before the call (TESSERA_DEBUG).
  bool compares_plain = false;
  std::vector<Input> inputs;    ///< plans for the defined tensor arguments, in schema order
  std::vector<Output> outputs;  ///< plans for the results, in the order of ShardingRule::outputs
  std::vector<Rewritten> rewritten;
  std::optional<LocalCall> local_call;
  const Lowering* lowering = nullptr;  ///< the lowering of a kLowering call
};

/// A call with its plan. The stack has the operator's arguments; the results replace the arguments.
struct PlannedCall {
  PlannedCall(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
              torch::jit::Stack& stack)
      : op(op), info(info), plan(plan), stack(stack), first(stack.size() - info.arguments.size()) {}

  // A PlannedCall refers to the operator and the plan, and ends before its dispatch() returns.
  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  CallPlan& plan;
  torch::jit::Stack& stack;
  const std::size_t first;  ///< index on the stack of the call's first argument

  c10::IValue& argument(int i) const { return stack[first + static_cast<std::size_t>(i)]; }
  std::span<c10::IValue> arguments() const { return std::span(stack).subspan(first); }
  /// Replaces the call's arguments on the stack by `results`.
  void return_results(std::initializer_list<c10::IValue> results) const {
    stack.resize(first);
    stack.insert(stack.end(), results);
  }
};

/// Makes the plan of an operator call. Not collective: every rank makes the same plan, or throws
/// the same Error.
CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info,
                   std::span<const c10::IValue> arguments);

/// Throws Error, on all ranks, if this thread's StrictScope or ReplicationScope does not permit the
/// plan; no cache key contains these scopes. Also throws if a gradient is needed through another
/// library's operator that has no autograd kernel. Otherwise warns once about an operator without a
/// rule, and installs the hooks that make gradients of plain tensor arguments plain. Compares plain
/// tensors between ranks, if the scopes permit them but do not declare them equal.
void check_policy(const PlannedCall& call);

/// Like check_policy, for operator `name`, which gathers inputs without a plan. Not collective.
void check_gather(const std::string& name, const std::vector<at::Tensor>& tensors);

/// Throws Error, on all ranks, unless the plain tensors among `tensors`, the arguments of operator
/// `what`, are equal on the ranks of the mesh. Number literals (2.0) are not compared. Collective
/// if there is a tensor to compare; the exchange uses CPU memory.
void compare_plain(const DeviceMesh& mesh, std::string_view what, std::vector<at::Tensor> tensors);

/// Returns advice for an error message if one of `tensors` is a distributed parameter, used before
/// the hooks of the parameter's module have run. Otherwise returns an empty text.
std::string remedy_of_calling(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

/// The indices in `bound` of the tensors that the called operator writes to.
std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound);

}  // namespace tessera::detail
