#include "tessera/observe/metric.h"

#include <c10/core/Device.h>

#include <cmath>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::observe {

using nlohmann::json;

/// Reads a metric's sums from JSON. A NaN or infinite sum is null in JSON and is read as NaN.
MeanMetric::Sums MeanMetric::read(const json& state) {
  const auto number = [&](const char* name) {
    const json& value = state.at(name);
    return value.is_number() ? value.get<double>() : std::nan("");
  };
  return {number("sum"), number("weight")};
}

void MeanMetric::update(double value, double weight) {
  TESSERA_CHECK(!of_all_, "a metric was updated between sync() and unsync(): call unsync() first");
  own_.values += value * weight;
  own_.weights += weight;
}

double MeanMetric::compute() const {
  const Sums& sums = of_all_ ? *of_all_ : own_;
  return sums.values / sums.weights;
}

void MeanMetric::sync(comm::World& world) {
  TESSERA_CHECK(!of_all_, "sync() was called twice on a metric: call unsync() first");
  if (world.size() == 1) {
    of_all_ = own_;
    return;
  }
  std::vector<json> of_ranks;
  for (const std::string& text :
       comm::gather_texts(*world.host_group(comm::ranks_of_world(world.size()), "metrics"),
                          c10::kCPU, state_dict().dump())) {
    of_ranks.push_back(json::parse(text));
  }
  of_all_ = read(merged(of_ranks));
}

void MeanMetric::unsync() {
  TESSERA_CHECK(of_all_, "unsync() was called on a metric before sync(): call sync() first");
  of_all_.reset();
}

json MeanMetric::state_dict() const {
  return {{"sum", own_.values}, {"weight", own_.weights}};
}

void MeanMetric::load_state_dict(const json& state) {
  own_ = read(state);
  of_all_.reset();
}

json MeanMetric::merged(const std::vector<json>& of_ranks) const {
  Sums all;
  for (const json& of_rank : of_ranks) {
    const Sums sums = read(of_rank);
    all.values += sums.values;
    all.weights += sums.weights;
  }
  return {{"sum", all.values}, {"weight", all.weights}};
}

void MeanMetric::reset() {
  own_ = {};
  of_all_.reset();
}

}  // namespace tessera::observe
