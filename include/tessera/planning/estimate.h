#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// What the first rank of a training takes, whose shards are the largest.
struct Estimate {
  std::int64_t peak_bytes = 0;
  std::string peak_moment{};
  double exposed_s = 0;  ///< how long computation waits for collectives
  /// With step_time_s, tokens_per_s, tflops and mfu.
  observe::StepMetrics metrics{};
};

/// A model with equal layers in a row.
struct LayeredModel {
  std::int64_t layers = 0;  ///< 0: it has none that are equal
  std::string container{};  ///< FQN of what holds them: "model.layers"
};

/// Estimates a training on a machine without planning all layers: the highest use of memory while a
/// unit is under way, and the time, grow by the same with each layer. So they follow from two plans
/// of few layers; of a model with few or unequal layers it is one plan of the whole.
/// `plan_of(layers)`: the first rank's plan of the model with so many layers, 0: with all.
/// `options`: of the whole model.
Estimate estimate(const std::function<RankPlan(std::int64_t layers)>& plan_of,
                  const LayeredModel& model, std::int64_t ranks, const PlanOptions& options);

}  // namespace tessera::planning
TESSERA_API_END
