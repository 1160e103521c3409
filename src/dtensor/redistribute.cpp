#include "redistribute.h"

#include <ATen/ops/empty.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <span>
#include <utility>

#include "agreement.h"
#include "below_autograd.h"
#include "redistribute_steps.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/core/bounded_cache.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

constexpr std::size_t kCachedPlans = 2048;

struct PlanKey {
  TensorSpecPtr spec;
  LayoutPtr target;
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

struct PlanKeyHash {
  std::size_t operator()(const PlanKey& key) const {
    return std::hash<const void*>{}(key.spec.get()) * 31 + std::hash<LayoutPtr>{}(key.target);
  }
};

/// Of a thread, not of the process: it holds meshes, which belong to a rank.
auto& plans() {
  thread_local BoundedCache<PlanKey, Plan, PlanKeyHash> plans(kCachedPlans);
  return plans;
}

/// What a step is for, in full: ranks that mean another one are told so (TESSERA_DEBUG).
std::optional<comm::PurposeScope> compared(const Step& step, const at::Tensor& local,
                                           const DeviceMesh& mesh, c10::IntArrayRef sizes) {
  if (!checks_calls()) [[likely]]
    return std::nullopt;
  return std::make_optional<comm::PurposeScope>(
      group_of(step, mesh), fmt::format("{} of {} [{}] {} -> {}", comm::CallerScope::current(),
                                        c10::toString(local.scalar_type()), fmt::join(sizes, ", "),
                                        to_string(*step.from), to_string(*step.to)));
}

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
      if (local.is_cpu()) finish_transfers();
      return finish(start_step(step, local, mesh, sizes));
  }
}

/// Runs `steps` from start to end.
at::Tensor run_steps(std::span<const Step> steps, at::Tensor local, const DeviceMesh& mesh,
                     c10::IntArrayRef sizes) {
  for (const auto& step : steps) {
    const auto shape = local_sizes(ShardingSpec{mesh, step.to}, sizes);
    local = local.is_meta() ? at::empty(shape, local.options())
                            : local_step(step, local, mesh, sizes).reshape(shape);
  }
  return local;
}

}  // namespace

void clear_plans() {
  plans().clear();
}

PlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target) {
  return plans().get({spec, target}, [](const PlanKey& key) {
    return plan_redistribution(key.spec->sharding.layout, key.target, key.spec->sizes,
                               static_cast<std::int64_t>(c10::elementSize(key.spec->dtype)));
  });
}

at::Tensor run_plan(const Plan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes) {
  if (plan.steps.empty()) return local;
  BelowAutograd guard;
  return run_steps(plan.steps, std::move(local), mesh, sizes);
}

TransferPtr start_plan(PlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes) {
  const std::span<const Step> steps(plan->steps);
  std::size_t last = steps.size();
  while (last > 0 && !communicates(steps[last - 1])) --last;
  if (last == 0 || local.is_meta()) return nullptr;
  BelowAutograd guard;
  const auto& step = steps[last - 1];
  local = run_steps(steps.first(last - 1), std::move(local), mesh, sizes);
  auto* group = local.is_cpu() ? &group_of(step, mesh) : nullptr;
  if (group != nullptr) finish_transfers_on(*group);
  auto started = start_step(step, local, mesh, sizes);
  started.rest = [plan = std::move(plan), rest = std::move(started.rest), steps, last, mesh,
                  sizes = sizes.vec()] {
    const auto shape = local_sizes(ShardingSpec{mesh, steps[last - 1].to}, sizes);
    return run_steps(steps.subspan(last), rest().reshape(shape), mesh, sizes);
  };
  return Transfer::start(std::move(started), group);
}

at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec,
                              LayoutPtr target) {
  if (spec->sharding.layout == target) return local;
  return run_plan(*plan_for(spec, target), local, spec->sharding.mesh, spec->sizes);
}

}  // namespace tessera::detail
