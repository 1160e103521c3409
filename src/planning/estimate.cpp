// Estimates the memory and time of a training layout from run plans of the same model
// with fewer layers.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string_view>

#include "schedule.h"
#include "tessera/observe/detail/memory.h"
#include "tessera/planning/detail/search.h"

namespace tessera::planning {
namespace {

/// A model's memory and time are extrapolated from models with 4 and 6 layers. The two models
/// differ by two layers, because two types of layers can alternate.
constexpr std::int64_t kFewLayers = 4, kMoreLayers = 6;

/// Replaces the layer index n in a name such as "model.layers.3" by the result of number(n).
template <class Number>
std::string renumbered(const std::string& name, const std::string& container,
                       const Number& number) {
  constexpr std::string_view kDigits = "-0123456789";
  const std::string before = container + ".";
  const std::size_t found = name.find(before);
  const std::size_t digits = found + before.size();
  if (found == std::string::npos || digits == name.find_first_not_of(kDigits, digits)) {
    return name;
  }
  const std::size_t end = std::min(name.find_first_not_of(kDigits, digits), name.size());
  const std::int64_t layer = std::strtoll(name.c_str() + digits, nullptr, 10);
  return name.substr(0, digits) + std::to_string(number(layer)) + name.substr(end);
}

/// Returns the memory of each part of a step, by the part's name. Names count the layers of the
/// second half from the end (-1 is the last layer), so that models of different depth have the same
/// names.
std::map<std::string, double> bytes_by_moment(const RankPlan& plan, const std::string& container,
                                              std::int64_t layers) {
  std::map<std::string, double> bytes;
  for (const observe::MomentMemory& moment : plan.memory.moments) {
    const std::string key = renumbered(moment.name, container, [&](std::int64_t layer) {
      return layer < layers / 2 ? layer : layer - layers;
    });
    bytes[key] = static_cast<double>(moment.bytes);
  }
  return bytes;
}

double exposed(const StepTime& time) {
  double sum = 0;
  for (const auto& [group, seconds] : time.exposed) {
    sum += seconds;
  }
  return sum;
}

Estimate of_whole(const RankPlan& plan, std::int64_t ranks, const PlanOptions& options) {
  Estimate estimate{.peak_bytes = plan.memory.peak_bytes,
                    .peak_moment = plan.memory.peak_moment,
                    .exposed_s = exposed(*plan.time)};
  estimate.metrics.step_time_s = plan.time->total;
  set_speed(estimate.metrics, ranks, plan.time->flops, options);
  return estimate;
}

/// Extrapolates the estimate for `layers` layers from plans with 4 and 6 layers.
Estimate of_layers(const RankPlan& few, const RankPlan& more, std::int64_t layers,
                   const std::string& container, std::int64_t ranks, const PlanOptions& options) {
  const auto grown = [&](double with_few, double with_more) {
    const double each = (with_more - with_few) / (kMoreLayers - kFewLayers);
    return with_few + each * static_cast<double>(layers - kFewLayers);
  };
  Estimate estimate;
  const std::map<std::string, double> bytes = bytes_by_moment(more, container, kMoreLayers);
  for (const auto& [key, with_few] : bytes_by_moment(few, container, kFewLayers)) {
    const auto same = bytes.find(key);
    if (same == bytes.end()) {
      continue;
    }
    if (const auto now = std::llround(grown(with_few, same->second)); now > estimate.peak_bytes) {
      estimate.peak_bytes = now;
      estimate.peak_moment = renumbered(
          key, container, [&](std::int64_t layer) { return layer < 0 ? layer + layers : layer; });
    }
  }
  estimate.metrics.step_time_s = grown(few.time->total, more.time->total);
  estimate.exposed_s = grown(exposed(*few.time), exposed(*more.time));
  set_speed(estimate.metrics, ranks, grown(few.time->flops, more.time->flops), options);
  return estimate;
}

}  // namespace

std::function<Estimate(const TrainingLayout&)> estimate_by_plans(
    const std::function<MakeRun(const TrainingLayout&, std::int64_t)>& run_of, std::int64_t layers,
    const std::string& container, std::int64_t ranks, const PlanOptions& options) {
  return [=](const TrainingLayout& layout) {
    const auto plan_of = [&](std::int64_t planned) {
      return detail::plan_rank(run_of(layout, planned), ranks, /*rank=*/0, options);
    };
    return layers <= kMoreLayers ? of_whole(plan_of(0), ranks, options)
                                 : of_layers(plan_of(kFewLayers), plan_of(kMoreLayers), layers,
                                             container, ranks, options);
  };
}

}  // namespace tessera::planning
