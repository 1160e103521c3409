// Runs the plans of core's planner (tessera/core/redistribute_plan.h) on local tensors: a
// redistribution is planned once, and its steps are the functions of redistribute_steps.cpp. Both
// the program's own redistributions and those of operators' arguments
// (execute/localize_arguments.cpp) end here.

#include "redistribute/redistribute.h"

#include <ATen/ops/empty.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <span>
#include <utility>

#include "agreement/agreement.h"
#include "rank/below_autograd.h"
#include "redistribute/redistribute_steps.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/bounded_cache.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"

namespace tessera::detail {
namespace {

/// A bound on memory: a spec has the sizes, so a program whose sizes change never stops making
/// plans.
constexpr std::size_t kCachedPlans = 2048;

/// Spec and layout are interned, so that keys are compared and hashed by pointer. The key owns
/// them: an address in use is not taken by another.
struct RedistributionKey {
  TensorSpecPtr spec;
  LayoutPtr target;
  friend bool operator==(const RedistributionKey&, const RedistributionKey&) = default;
};

struct RedistributionKeyHash {
  std::size_t operator()(const RedistributionKey& key) const {
    return std::hash<const void*>{}(key.spec.get()) * 31 + std::hash<LayoutPtr>{}(key.target);
  }
};

/// One cache per thread: it holds meshes, which belong to a rank, and a process may run several
/// ranks as threads.
auto& plans() {
  thread_local BoundedCache<RedistributionKey, RedistributionPlan, RedistributionKeyHash> plans(
      kCachedPlans);
  return plans;
}

/// With the checks of TESSERA_DEBUG: describes the step to the group, which then reports ranks that
/// call another one.
std::optional<comm::PurposeScope> compared(const Step& step, const at::Tensor& local,
                                           const DeviceMesh& mesh, c10::IntArrayRef sizes) {
  if (!checks_calls()) [[likely]] {
    return std::nullopt;
  }
  return std::make_optional<comm::PurposeScope>(
      group_of(step, mesh), fmt::format("{} of {} [{}] {} -> {}", comm::CallerScope::current(),
                                        c10::toString(local.scalar_type()), fmt::join(sizes, ", "),
                                        to_string(*step.from), to_string(*step.to)));
}

/// A step that communicates, up to where its result is needed.
Started start_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                   c10::IntArrayRef sizes) {
  const auto purpose = compared(step, local, mesh, sizes);
  switch (step.kind) {
    case StepKind::kAllGather:
      return all_gather_step(step, local, mesh, sizes);
    case StepKind::kReduceScatter:
      return reduce_scatter_step(step, local, mesh, sizes);
    case StepKind::kAllReduce:
      return all_reduce_step(step, local, mesh);
    case StepKind::kAllToAll:
      return all_to_all_step(step, local, mesh, sizes);
    default:
      fail("internal: this step of a redistribution communicates nothing");
  }
}

/// Any step, to its end.
at::Tensor local_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes) {
  switch (step.kind) {
    case StepKind::kSlice:
      return slice_step(step, local, mesh, sizes);
    case StepKind::kMakePartial:
      return make_partial_step(step, local, mesh);
    case StepKind::kRelabel:
      return local;
    default:
      // Waited for at once, so behind what this rank has under way (see Transfer).
      if (!group_of(step, mesh).keeps_order_on_device()) {
        finish_transfers();
      }
      return finish(start_step(step, local, mesh, sizes));
  }
}

/// Whether a step has nothing to do: a meta tensor has shapes alone.
bool only_shapes(const Step& step, const at::Tensor& local, const DeviceMesh& mesh) {
  return local.is_meta() && !(communicates(step) && group_of(step, mesh).takes_meta_tensors());
}

/// Runs `steps`, each to its end.
at::Tensor run_steps(std::span<const Step> steps, at::Tensor local, const DeviceMesh& mesh,
                     c10::IntArrayRef sizes) {
  for (const auto& step : steps) {
    // Steps give the elements in order, but not in shape: that is a function of the layout.
    const auto shape = local_sizes(ShardingSpec{mesh, step.to}, sizes);
    local = only_shapes(step, local, mesh) ? at::empty(shape, local.options())
                                           : local_step(step, local, mesh, sizes).reshape(shape);
  }
  return local;
}

}  // namespace

void clear_plans() {
  plans().clear();
}

RedistributionPlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target) {
  return plans().get({spec, target}, [](const RedistributionKey& key) {
    return plan_redistribution(key.spec->sharding.layout, key.target, key.spec->sizes,
                               static_cast<std::int64_t>(c10::elementSize(key.spec->dtype)));
  });
}

at::Tensor run_plan(const RedistributionPlan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes) {
  if (plan.steps.empty()) {
    return local;
  }
  BelowAutograd guard;
  return run_steps(plan.steps, std::move(local), mesh, sizes);
}

TransferPtr start_plan(RedistributionPlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes) {
  const std::span<const Step> steps(plan->steps);
  std::size_t last = steps.size();  // one past the last collective
  while (last > 0 && !communicates(steps[last - 1])) {
    --last;
  }
  // Without a collective there is nothing to hide: the caller runs the plan as usual.
  if (last == 0 || local.is_meta()) {
    return nullptr;
  }
  BelowAutograd guard;
  const auto& step = steps[last - 1];
  local = run_steps(steps.first(last - 1), std::move(local), mesh, sizes);
  // NCCL's stream keeps collectives in order. Elsewhere transfers have to, also those of a GPU's
  // tensors that go through the host (see Transfer).
  comm::Communicator* group = &group_of(step, mesh);
  if (group->keeps_order_on_device()) {
    group = nullptr;
  } else {
    finish_transfers_on(*group);
  }
  auto started = start_step(step, local, mesh, sizes);
  // The transfer may outlive everything that it was started from, the cached plan as well: it owns
  // the plan, into which `steps` points. The steps after the last collective have none, so
  // finishing the transfer needs no peer except those of the collective.
  started.rest = [plan = std::move(plan), rest = std::move(started.rest), steps, last, mesh,
                  sizes = sizes.vec()] {
    const auto shape = local_sizes(ShardingSpec{mesh, steps[last - 1].to}, sizes);
    return run_steps(steps.subspan(last), rest().reshape(shape), mesh, sizes);
  };
  return Transfer::start(std::move(started), group);
}

at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec,
                              LayoutPtr target) {
  if (spec->sharding.layout == target) {
    return local;
  }
  return run_plan(*plan_for(spec, target), local, spec->sharding.mesh, spec->sizes);
}

at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target) {
  const BelowAutograd guard;
  const DeviceMesh& mesh = target.mesh;
  const at::Tensor whole = mesh.coordinate() == mesh.shape().coordinate(source)
                               ? tensor.contiguous().clone()
                               : at::empty(tensor.sizes(), tensor.options());
  if (mesh.size() > 1 && whole.numel() > 0 && !whole.is_meta()) {
    flush_pending_transfers(mesh.group_of_all_ranks()).broadcast(whole, source)->wait();
  }
  const auto sizes = tensor.sizes().vec();
  const ShardingSpec replicated{
      mesh, Layout::replicated(mesh.shape().sizes(), static_cast<int>(tensor.dim()))};
  return redistribute_local(
      whole, intern_spec({replicated, sizes, contiguous_strides(sizes), tensor.scalar_type()}),
      target.layout);
}

}  // namespace tessera::detail
