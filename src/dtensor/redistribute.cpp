#include "redistribute.h"

#include <utility>

#include <ATen/ops/empty.h>

#include "below_autograd.h"
#include "redistribute_steps.h"
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
    return std::hash<const void*>{}(key.spec.get()) * 31 + std::hash<const void*>{}(key.target);
  }
};

at::Tensor run_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes) {
  switch (step.kind) {
    case StepKind::kAllGather:
      return all_gather_step(step, local, mesh, sizes);
    case StepKind::kReduceScatter:
      return reduce_scatter_step(step, local, mesh, sizes);
    case StepKind::kAllReduce:
      return all_reduce_step(step, local, mesh);
    case StepKind::kAllToAll:
      return all_to_all_step(step, local, mesh, sizes);
    case StepKind::kSlice:
      return slice_step(step, local, mesh, sizes);
    case StepKind::kMakePartial:
      return make_partial_step(step, local, mesh);
    case StepKind::kRelabel:
      return local;
  }
  fail("internal: unknown redistribution step");
}

}  // namespace

PlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target) {
  // Of a thread, not of the process: it holds meshes, which belong to a rank.
  thread_local BoundedCache<PlanKey, Plan, PlanKeyHash> plans(kCachedPlans);
  return plans.get({spec, target}, [](const PlanKey& key) {
    return plan_redistribution(key.spec->sharding.layout, key.target, key.spec->sizes,
                               static_cast<std::int64_t>(c10::elementSize(key.spec->dtype)));
  });
}

at::Tensor run_plan(const Plan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes) {
  if (plan.steps.empty()) return local;
  BelowAutograd guard;
  for (const auto& step : plan.steps) {
    const auto shape = local_sizes(ShardingSpec{mesh, step.to}, sizes);
    local = local.is_meta() ? at::empty(shape, local.options())
                            : run_step(step, local, mesh, sizes).reshape(shape);
  }
  return local;
}

at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec,
                              LayoutPtr target) {
  if (spec->sharding.layout == target) return local;
  return run_plan(*plan_for(spec, target), local, spec->sharding.mesh, spec->sizes);
}

}  // namespace tessera::detail
