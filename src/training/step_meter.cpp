#include "tessera/training/step_meter.h"

#include <utility>

namespace tessera::training {

StepMeter::StepMeter(comm::WorldPtr world, std::string device)
    : world_(std::move(world)), device_(std::move(device)) {}

double StepMeter::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void StepMeter::begin() {
  start_ = Clock::now();
  data_time_s_ = 0;
  before_ = world_->traffic().table();
}

void StepMeter::data_ready() {
  data_time_s_ = seconds();
}

observe::StepMetrics StepMeter::end(const TrainState& state, const StepResult& result, double lr) {
  observe::StepMetrics metrics;
  metrics.step = state.step;
  metrics.loss = result.loss;
  metrics.grad_norm = result.grad_norm;
  metrics.lr = lr;
  metrics.loss_scale = result.loss_scale;
  metrics.skipped = result.skipped;
  metrics.data_time_s = data_time_s_;
  metrics.step_time_s = seconds();
  observe::set_memory(metrics, device_);
  metrics.comm = world_->traffic().since(before_);
  return metrics;
}

}  // namespace tessera::training
