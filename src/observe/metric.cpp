#include "tessera/observe/metric.h"

#include <c10/core/Device.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::observe {
namespace {

using nlohmann::json;

/// A value as JSON. Infinities, which JSON lacks, are encoded as texts, because minima and maxima
/// start with infinities.
json to_json(double value) {
  if (std::isfinite(value)) {
    return value;
  }
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

double to_double(const json& value) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (!value.is_string()) {
    return value.get<double>();
  }
  return value == "inf" ? kInfinity : value == "-inf" ? -kInfinity : std::nan("");
}

double reduced(double a, double b, Reduction reduction) {
  switch (reduction) {
    case Reduction::kMin:
      return std::min(a, b);
    case Reduction::kMax:
      return std::max(a, b);
    default:
      return a + b;
  }
}

}  // namespace

double& Metric::add_state(const std::string& name, double initial, Reduction reduction) {
  TESSERA_CHECK(reduction != Reduction::kSum || initial == 0, "the state '", name,
                "' of a metric is summed over ranks and begins at ", initial,
                ": begin at 0, or it counts once for each rank");
  const auto [place, is_new] = values_.try_emplace(name, Value{initial, initial, reduction});
  TESSERA_CHECK(is_new, "a metric has two states named '", name, "': give each its own name");
  return place->second.value;
}

void Metric::check_update() const {
  TESSERA_CHECK(!synced_,
                "a metric was updated while it has the values of all ranks: call "
                "unsync() first");
}

void Metric::sync(comm::World& world) {
  TESSERA_CHECK(!synced_, "a metric has the values of all ranks already: call unsync() first");
  if (world.size() > 1) {
    json own = state_dict();
    const std::vector<int> ranks = comm::ranks_of_world(world.size());
    std::vector<json> of_ranks;
    for (const std::string& text :
         comm::gather_texts(*world.host_group(ranks, "metrics"), c10::kCPU, own.dump())) {
      of_ranks.push_back(json::parse(text));
    }
    set_values(merged(of_ranks));
    own_ = std::move(own);
  }
  synced_ = true;
}

void Metric::unsync() {
  TESSERA_CHECK(synced_, "a metric has its rank's own values: call sync() first");
  if (!own_.is_null()) {
    set_values(own_);
  }
  own_ = nullptr;
  synced_ = false;
}

json Metric::state_dict() const {
  if (!own_.is_null()) {
    return own_;
  }
  json state = json::object();
  for (const auto& [name, value] : values_) {
    state[name] = to_json(value.value);
  }
  return state;
}

void Metric::load_state_dict(const json& state) {
  set_values(state);
  own_ = nullptr;
  synced_ = false;
}

/// Sets all values from a saved state. All saved values are read before any value is changed.
void Metric::set_values(const json& state) {
  std::map<std::string, double> found;
  for (const auto& [name, value] : values_) {
    found[name] = to_double(state.at(name));
  }
  for (auto& [name, value] : values_) {
    value.value = found.at(name);
  }
}

json Metric::merged(const std::vector<json>& of_ranks) const {
  json state = json::object();
  for (const auto& [name, value] : values_) {
    double all = value.initial;
    for (const json& of_rank : of_ranks) {
      all = reduced(all, to_double(of_rank.at(name)), value.reduction);
    }
    state[name] = to_json(all);
  }
  return state;
}

void Metric::reset() {
  for (auto& [name, value] : values_) {
    value.value = value.initial;
  }
  own_ = nullptr;
  synced_ = false;
}

void MeanMetric::update(double value, double weight) {
  check_update();
  sum_ += value * weight;
  weight_ += weight;
}

double MeanMetric::compute() const {
  return sum_ / weight_;
}

}  // namespace tessera::observe
