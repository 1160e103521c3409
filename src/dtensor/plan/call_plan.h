// CallPlan: how the dispatcher runs an operator call on distributed tensors.
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

/// How an operator call is run; chosen by plan_call().
enum class CallKind : std::uint8_t {
  kPlain,          ///< libtorch's kernel runs; no argument is distributed
  kDecomposed,     ///< the operators of which the operator is composed are dispatched one by one
  kDirect,         ///< the operator runs on the local tensors, and its results are wrapped
  kLocal,          ///< like kDirect, but arguments are rewritten or new values are copied back
  kFailTogether,   ///< like kLocal, but all ranks throw if the operator throws on one rank
  kLowering,       ///< a lowering runs: an implementation of the operator that sends less data
  kRandomInplace,  ///< random fill: each number is drawn by the global index of its element
  kNativeDropout,  ///< dropout; its mask is drawn by the global indices of the elements
};

/// How an operator runs on this rank for inputs with certain specs. Calls with equal cache keys
/// share a call plan. The first call adds the specs of the results.
struct CallPlan {
  /// How one tensor argument is redistributed and written. Undefined tensors have no Input.
  struct Input {
    TensorSpecPtr spec;  ///< the tensor's spec; a replicated spec for a plain tensor
    /// The layout to which the tensor is redistributed; nullptr: the tensor keeps its layout.
    LayoutPtr target = nullptr;
    RedistributionPlanPtr plan;  ///< the steps of the redistribution to `target`
    /// The layout of the value that is copied back to a written tensor; nullptr: no copy is needed.
    LayoutPtr written = nullptr;
    bool updated = false;   ///< whether the tensor is a running statistic that the call updates
    bool detached = false;  ///< whether the tensor is a DetachedView (distributed_impl.h)

    LayoutPtr layout() const { return target != nullptr ? target : spec->sharding.layout; }
  };
  /// The sharding of one result. Each tensor in a list of results has its own Output.
  struct Output {
    LayoutPtr layout = nullptr;
    std::vector<std::int64_t> sizes;                   ///< global sizes; negative if not yet known
    std::optional<std::vector<std::int64_t>> strides;  ///< global strides of a view
    TensorSpecPtr spec;       ///< spec of the result, set by the first call
    bool contiguous = false;  ///< whether run_local makes the result contiguous
  };
  /// The operator that run_local calls on the local tensors in place of the called operator.
  struct LocalCall {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    double scale = 1.0;  ///< run_local multiplies the results of `op` by `scale`
  };

  /// The local value for an argument that contains global sizes, such as `size` of view().
  struct Rewritten {
    int argument;
    c10::IValue value;
    std::optional<std::vector<std::int64_t>> sizes;
  };

  CallKind kind = CallKind::kLocal;
  ShardingSpec replicated;  ///< the call's mesh; the layout is for results without a rule
  bool has_rule = false;
  bool seeded = false;  ///< whether the call draws from a generator that all ranks seed equally
  bool moves = false;   ///< whether the call moves data that the caller did not request
  /// Whether the call moves data because the caller requested a value, as in item().
  bool asked_for = false;
  bool takes_plain = false;  ///< whether an argument is a plain tensor, not a number literal
  bool mixes_plain = false;  ///< whether an argument is a plain tensor with more than one element
  /// Whether TESSERA_DEBUG=1 requires that ranks compare the plain tensor arguments.
  bool compares_plain = false;
  std::vector<Input> inputs;    ///< one for each defined tensor argument, in schema order
  std::vector<Output> outputs;  ///< one for each result, in the order of ShardingRule::outputs
  std::vector<Rewritten> rewritten;
  std::optional<LocalCall> local_call;
  const Lowering* lowering = nullptr;  ///< the implementation that a kLowering call runs
};

struct PlannedCall {
  PlannedCall(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
              torch::jit::Stack& stack)
      : op(op), info(info), plan(plan), stack(stack), first(stack.size() - info.arguments.size()) {}

  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  CallPlan& plan;
  torch::jit::Stack& stack;
  const std::size_t first;  ///< index of the call's first argument on the stack

  c10::IValue& argument(int i) const { return stack[first + static_cast<std::size_t>(i)]; }
  std::span<c10::IValue> arguments() const { return std::span(stack).subspan(first); }
  void return_results(std::initializer_list<c10::IValue> results) const {
    stack.resize(first);
    stack.insert(stack.end(), results);
  }
};

/// Makes the call plan of an operator call. Not collective: every rank makes the same call plan, or
/// throws the same Error.
CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info,
                   std::span<const c10::IValue> arguments);

/// Throws Error, on all ranks, if the thread's StrictScope or ReplicationScope forbids the call, or
/// if an operator of another library lacks a needed autograd kernel. Warns once about an operator
/// without a sharding rule. Collective if plain tensors must be compared between ranks.
void check_policy(const PlannedCall& call);

/// Like check_policy, for operator `name`, which has no call plan and gathers its inputs.
void check_gather(const std::string& name, const std::vector<at::Tensor>& tensors);

/// Throws Error, on all ranks, unless the plain `tensors` are equal on all ranks of the mesh.
/// Number literals are not compared. Collective if there is a tensor to compare. `what`: the
/// operator.
void compare_plain(const DeviceMesh& mesh, std::string_view what, std::vector<at::Tensor> tensors);

/// Returns advice to call the module, not its forward(), if one of `tensors` is a distributed
/// parameter whose module's hooks have not run. Otherwise returns "".
std::string remedy_of_calling(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound);

}  // namespace tessera::detail
