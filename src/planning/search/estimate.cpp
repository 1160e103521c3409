// The memory of a step is highest in some unit. Counted from the nearer end of the model, each unit
// is there with few layers, too; what a unit has with n layers is linear in n.

#include "tessera/planning/estimate.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string_view>

namespace tessera::planning {
namespace {

/// The first and the last layers differ from those between them, since FSDP gathers ahead and keeps
/// the last one. Two more, so that what goes in pairs shows.
constexpr std::int64_t kFewLayers = 4, kMoreLayers = 6;

/// The name of a moment with another number of its layer, if it is in one.
template <class Number>
std::string renumbered(const std::string& name, const LayeredModel& model, const Number& number) {
  constexpr std::string_view kDigits = "-0123456789";
  const std::string before = model.container + ".";
  const std::size_t found = name.find(before);
  const std::size_t digits = found + before.size();
  if (found == std::string::npos || digits == name.find_first_not_of(kDigits, digits)) {
    return name;
  }
  const std::size_t end = std::min(name.find_first_not_of(kDigits, digits), name.size());
  const std::int64_t layer = std::strtoll(name.c_str() + digits, nullptr, 10);
  return name.substr(0, digits) + std::to_string(number(layer)) + name.substr(end);
}

/// Layers of the second half are counted from the end: -1 is the last.
std::string key_of(const std::string& name, const LayeredModel& model) {
  return renumbered(name, model, [&](std::int64_t layer) {
    return layer < model.layers / 2 ? layer : layer - model.layers;
  });
}

/// The reverse.
std::string moment_of(const std::string& key, const LayeredModel& model) {
  return renumbered(key, model,
                    [&](std::int64_t layer) { return layer < 0 ? layer + model.layers : layer; });
}

std::map<std::string, double> bytes_by_moment(const RankPlan& plan, const LayeredModel& model) {
  std::map<std::string, double> bytes;
  for (const observe::MomentMemory& moment : plan.memory.moments) {
    bytes[key_of(moment.name, model)] = static_cast<double>(moment.bytes);
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

/// What two plans of few layers say of the whole model.
Estimate of_layers(const RankPlan& few, const RankPlan& more, const LayeredModel& model) {
  const auto grown = [&](double with_few, double with_more) {
    const double each = (with_more - with_few) / (kMoreLayers - kFewLayers);
    return with_few + each * static_cast<double>(model.layers - kFewLayers);
  };
  Estimate estimate;
  const std::map<std::string, double> bytes = bytes_by_moment(more, {kMoreLayers, model.container});
  for (const auto& [key, with_few] : bytes_by_moment(few, {kFewLayers, model.container})) {
    const auto same = bytes.find(key);
    if (same == bytes.end()) {
      continue;
    }
    if (const auto now = std::llround(grown(with_few, same->second)); now > estimate.peak_bytes) {
      estimate.peak_bytes = now;
      estimate.peak_moment = moment_of(key, model);
    }
  }
  estimate.metrics.step_time_s = grown(few.time->total, more.time->total);
  estimate.exposed_s = grown(exposed(*few.time), exposed(*more.time));
  return estimate;
}

Estimate of_whole(const RankPlan& plan) {
  Estimate estimate{.peak_bytes = plan.memory.peak_bytes,
                    .peak_moment = plan.memory.peak_moment,
                    .exposed_s = exposed(*plan.time),
                    .metrics = {}};
  estimate.metrics.step_time_s = plan.time->total;
  return estimate;
}

}  // namespace

Estimate estimate(const std::function<RankPlan(std::int64_t layers)>& plan_of,
                  const LayeredModel& model, std::int64_t ranks, const PlanOptions& options) {
  if (model.layers <= kMoreLayers) {
    const RankPlan plan = plan_of(0);
    Estimate estimate = of_whole(plan);
    set_speed(estimate.metrics, ranks, plan.time->flops, options);
    return estimate;
  }
  const RankPlan few = plan_of(kFewLayers), more = plan_of(kMoreLayers);
  Estimate estimate = of_layers(few, more, model);
  const double each = (more.time->flops - few.time->flops) / (kMoreLayers - kFewLayers);
  set_speed(estimate.metrics, ranks,
            few.time->flops + each * static_cast<double>(model.layers - kFewLayers), options);
  return estimate;
}

}  // namespace tessera::planning
