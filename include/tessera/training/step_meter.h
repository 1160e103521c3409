#pragma once

#include <chrono>
#include <string>

#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/observe/metrics.h"
#include "tessera/training/step.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// Measures a step: its time, what it sends, and its memory.
///
///   meter.begin();
///   const Batch batch = loader.load(state.step);
///   meter.data_ready();
///   const training::StepResult result = training::step(state, mesh, options, loss);
///   const observe::StepMetrics metrics = meter.end(state, result, lr * result.lr_factor);
///
/// Not collective.
class StepMeter {
 public:
  /// `device`: "cpu" or "cuda".
  StepMeter(comm::WorldPtr world, std::string device);
  void begin();
  /// The batch is there: what has passed counts as the wait for data.
  void data_ready();
  /// The metrics but for the throughput (observe::set_throughput). `lr`: the step's rate.
  observe::StepMetrics end(const TrainState& state, const StepResult& result, double lr);

 private:
  using Clock = std::chrono::steady_clock;

  double seconds() const;

  comm::WorldPtr world_;
  std::string device_;
  Clock::time_point start_;
  double data_time_s_ = 0;
  comm::TrafficTable before_;
};

}  // namespace tessera::training
TESSERA_API_END
