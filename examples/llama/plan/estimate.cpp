// The memory of a step is highest in some unit. Counted from the nearer end of the model, each unit
// is there with few layers, too; what a unit has with n layers is linear in n.

#include "examples/llama/plan/estimate.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "examples/llama/plan/rank_plan.h"

namespace llama {

using namespace tessera;

namespace {

/// The first and the last layers differ from those between them, since FSDP gathers ahead and keeps
/// the last one. Two more, so that what goes in pairs shows.
constexpr std::int64_t kFewLayers = 4, kMoreLayers = 6;

/// The name of a moment, with the number of a layer of the second half counted from the end.
std::string key_of(const std::string& name, std::int64_t layers) {
  constexpr std::string_view before = ".layers.";
  const std::size_t found = name.find(before);
  if (found == std::string::npos) {
    return name;
  }
  const std::size_t digits = found + before.size();
  const std::size_t end = std::min(name.find_first_not_of("0123456789", digits), name.size());
  const std::int64_t layer = std::strtoll(name.c_str() + digits, nullptr, 10);
  const std::int64_t counted = layer < layers / 2 ? layer : layer - layers;
  return name.substr(0, digits) + std::to_string(counted) + name.substr(end);
}

std::map<std::string, double> bytes_by_moment(const RankPlan& plan, std::int64_t layers) {
  std::map<std::string, double> bytes;
  for (const observe::MomentMemory& moment : plan.memory.moments) {
    bytes[key_of(moment.name, layers)] = static_cast<double>(moment.bytes);
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

/// What two plans of few layers say of one with `layers`.
Estimate of_layers(const RankPlan& few, const RankPlan& more, std::int64_t layers) {
  const auto grown = [&](double with_few, double with_more) {
    const double each = (with_more - with_few) / (kMoreLayers - kFewLayers);
    return with_few + each * static_cast<double>(layers - kFewLayers);
  };
  Estimate estimate;
  const std::map<std::string, double> bytes = bytes_by_moment(more, kMoreLayers);
  for (const auto& [key, with_few] : bytes_by_moment(few, kFewLayers)) {
    const auto same = bytes.find(key);
    if (same == bytes.end()) {
      continue;
    }
    if (const auto now = std::llround(grown(with_few, same->second)); now > estimate.peak_bytes) {
      estimate.peak_bytes = now;
      estimate.peak_moment = key;
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

Estimate estimate_rank(const TrainOptions& options, const Machine& machine) {
  const Config config = read_config(options.config);
  const auto plan_of = [&](std::int64_t layers) {
    TrainOptions cut = options;
    cut.layers = layers;
    return plan_rank(cut, machine, /*rank=*/0);
  };
  const bool whole = config.num_hidden_layers <= kMoreLayers || !options.freeze.empty();
  Estimate estimate =
      whole ? of_whole(plan_of(0))
            : of_layers(plan_of(kFewLayers), plan_of(kMoreLayers), config.num_hidden_layers);
  set_speed(estimate.metrics, options, machine, config);
  return estimate;
}

}  // namespace llama
