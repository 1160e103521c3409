// The order of the steps of a call on local tensors, and the step in their middle.

#include "execute/run_local.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "agreement/agreement.h"
#include "execute/foreach.h"
#include "operators/bound_call.h"
#include "random/seeded_generator.h"
#include "rank/below_autograd.h"
#include "tensor/distributed_impl.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "views/view_geometry.h"

namespace tessera::detail {
namespace {

/// In inference mode the copy that a moved tensor's view holds would be an inference tensor, which
/// counts no versions; but libtorch wants a view of a tensor that counts them to count them, too.
class OrdinaryViewScope {
 public:
  explicit OrdinaryViewScope(const LocalRun& run) {
    if (run.viewed.defined() && !run.viewed.is_inference() && run.is_moved()) {
      ordinary_.emplace(false);
    }
  }
  ~OrdinaryViewScope() {
    if (ordinary_) {
      ordinary_.reset();
      replay_views();
    }
  }
  OrdinaryViewScope(const OrdinaryViewScope&) = delete;
  OrdinaryViewScope& operator=(const OrdinaryViewScope&) = delete;

 private:
  std::optional<c10::InferenceMode> ordinary_;
};

/// Made anew each time: an argument is a value of the plan or one of this call's local tensors. The
/// schema is that of the local call's operator, which need not be the one that was called.
std::vector<c10::IValue> local_call_arguments(const LocalRun& run) {
  const CallPlan::LocalCall& local = *run.call.plan.local_call;
  const auto& schema = local.op.schema().arguments();
  std::vector<c10::IValue> arguments;
  for (std::size_t i = 0; i < local.arguments.size(); ++i) {
    arguments.push_back(to_ivalue(local.arguments[i], *schema[i].real_type(), run.locals));
  }
  return arguments;
}

/// Runs the rule's local call instead of the operator. The operator's own arguments leave the stack
/// unread: their tensors are in run.locals.
void run_local_call(LocalRun& run) {
  const CallPlan::LocalCall& local = *run.call.plan.local_call;
  torch::jit::Stack& stack = run.call.stack;
  const std::vector<c10::IValue> arguments = local_call_arguments(run);
  stack.resize(run.call.first);
  stack.insert(stack.end(), arguments.begin(), arguments.end());
  local.op.callBoxed(stack);
  // A mean over a split dimension is a sum, divided by the count of all elements.
  if (local.scale == 1.0) {
    return;
  }
  for (std::size_t i = run.call.first; i < stack.size(); ++i) {
    stack[i].toTensor().mul_(local.scale);
  }
}

/// Keeps the arguments to take a view of a moved tensor again from its base, once that was written
/// (write_through). Before the operator runs, which takes its arguments off the stack.
void keep_view_arguments(LocalRun& run) {
  if (run.call.info.viewed < 0 || !run.is_moved()) {
    return;
  }
  const auto arguments = run.call.arguments();
  run.view_arguments = run.call.plan.local_call
                           ? local_call_arguments(run)
                           : std::vector<c10::IValue>(arguments.begin(), arguments.end());
}

/// Autograd has recorded the call on the wrappers: it must not see local tensors. The write-back is
/// inside the guard too, since it copies between local tensors.
void run_on_local_tensors(LocalRun& run, CallKind kind) {
  const BelowAutograd guard;
  keep_view_arguments(run);
  if (kind == CallKind::kFailTogether) {
    run_or_fail_together(run.call.plan.replicated.mesh, run.call.info.name,
                         [&run] { run_operator(run); });
  } else {
    run_operator(run);
  }
  write_back(run);
}

/// For an operator that autograd does not know. Autograd records the operators inside its kernel,
/// as on one rank. Local tensors bring gradients to their wrappers.
void run_recorded(LocalRun& run) {
  const BelowFallback guard;
  run_operator(run);
}

bool requires_grad(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() && value.toTensor().requires_grad();
  }
  return value.isList() && std::ranges::any_of(value.toListRef(), requires_grad);
}

/// An argument that every rank has whole. Collective if it is a distributed tensor that is sharded
/// or partial. Tensors in lists are not replicated: no operator that may fail by matrix takes any.
c10::IValue replicated_argument(const c10::IValue& argument) {
  const auto* impl = argument.isTensor() && argument.toTensor().defined()
                         ? as_distributed(argument.toTensor())
                         : nullptr;
  if (impl == nullptr) {
    return argument;
  }
  const auto& spec = *impl->spec();
  const auto whole =
      Layout::replicated(spec.sharding.layout->mesh_sizes(), static_cast<int>(spec.sizes.size()));
  const BelowAutograd guard;
  return make_distributed(redistribute_local(impl->local(), impl->spec(), whole),
                          {spec.sharding.mesh, whole}, spec.sizes);
}

}  // namespace

// The caller's own tensors are kept before local ones take their places on the stack.
LocalRun::LocalRun(PlannedCall& c) : call(c) {
  for (const OperatorInfo::Return& result : call.info.returns) {
    if (result.written >= 0) {
      returned.push_back(call.argument(result.written));
    }
  }
  if (call.info.viewed >= 0 && call.argument(call.info.viewed).isTensor()) {
    viewed = call.argument(call.info.viewed).toTensor();
  }
}

/// Kernels of autograd hide its keys from what they call. Where the keys are still there,
/// autograd's fallback has let the call through: on plain tensors too it would record what the
/// kernel does.
bool is_to_be_recorded(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  const bool wanted = info.is_own && at::GradMode::is_enabled() && !is_below_autograd() &&
                      std::ranges::any_of(arguments, requires_grad);
  if (!wanted) {
    return false;
  }
  // A write or a view would have to become part of the wrapper's history.
  TESSERA_CHECK(info.written.empty() && info.viewed < 0, info.name,
                info.written.empty() ? " returns a view of" : " writes to",
                " an argument whose gradient is wanted, and no autograd kernel of it records "
                "that: implement it for DispatchKey::Autograd, or call it in a NoGradGuard");
  return true;
}

void run_operator(LocalRun& run) {
  if (run.call.plan.local_call) {
    return run_local_call(run);
  }
  // Every rank runs the whole operator and has to draw what the others draw.
  std::optional<SeededGenerator> generator;
  if (run.call.plan.seeded) {
    generator.emplace(run.device, next_random_key());
  }
  if (run.call.info.traits.has(Trait::kUnsafeView)) {
    run.call.argument(0) =
        viewable(run.call.argument(0).toTensor(), run.call.argument(1).toIntVector());
  }
  run.call.op.callBoxed(run.call.stack);
}

/// Versions are read before the operator, whose kernel may bump them itself; what it did not bump
/// is bumped once the values are written back. Results are wrapped last, from what the stack then
/// holds.
void run_local(PlannedCall& call, CallKind kind) {
  const ForeachVersionCounts counts(call);
  LocalRun run(call);
  run.recorded = kind == CallKind::kRecorded;
  const OrdinaryViewScope ordinary(run);
  localize_arguments(run);
  rewrite_arguments(run);
  run.recorded ? run_recorded(run) : run_on_local_tensors(run, kind);
  counts.bump();
  wrap_results(run);
}

// The arguments and the mesh are kept: a run replaces those on the stack, and may end in the middle
// of that.
bool run_agreed(PlannedCall& call) {
  const auto given = call.arguments();
  const std::vector<c10::IValue> arguments(given.begin(), given.end());
  const DeviceMesh mesh = call.plan.replicated.mesh;
  bool failed = false;
  try {
    run_local(call, CallKind::kAgreed);
  } catch (const c10::Error&) {  // the operator's own; an Error of a peer's failure passes
    failed = true;
  }
  // Every rank comes here, also one where the operator threw: no rank waits in vain.
  if (!any_rank(mesh, failed)) {
    return true;
  }
  call.stack.resize(call.first);
  std::ranges::transform(arguments, std::back_inserter(call.stack), replicated_argument);
  return false;
}

}  // namespace tessera::detail
