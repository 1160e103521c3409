#include "tessera/training/metric_log.h"

#include <fmt/format.h>

#include <utility>

namespace tessera::training {

MetricLog::MetricLog(MetricOptions options, comm::WorldPtr world)
    : options_(std::move(options)), world_(std::move(world)) {
  if (is_main()) {
    progress_ = std::make_unique<observe::Progress>(options_.steps, stdout);
  }
}

void MetricLog::open(std::int64_t done) {
  if (!is_main()) {
    return;
  }
  if (!options_.metrics.empty()) {
    history_ = observe::read_metrics(options_.metrics, done);
    writer_ = std::make_unique<observe::MetricsWriter>(options_.metrics, done);
  }
  if (!options_.tensorboard.empty()) {
    tensorboard_ = std::make_unique<observe::TensorBoardWriter>(options_.tensorboard, done + 1);
  }
}

void MetricLog::write(observe::StepMetrics metrics, std::int64_t tokens) {
  if (!is_main()) {
    return;
  }
  metrics.checkpoint_stall_s = std::exchange(stall_s_, std::nullopt);
  // A report shows the last step's traffic. Small blocks kept from every step would lie between
  // the step's large ones, and the heap would grow with the number of steps.
  if (!history_.empty()) {
    history_.back().comm.clear();
  }
  history_.push_back(metrics);
  if (writer_) {
    writer_->write(metrics);
  }
  if (tensorboard_) {
    observe::Scalars scalars = observe::titan_scalars(metrics, world_->size(), options_.device);
    scalars.emplace_back("n_tokens_seen", static_cast<double>(tokens));
    tensorboard_->write(metrics.step, scalars);
  }
  print(metrics);
  progress_->update(metrics.step, metrics.loss, metrics.tokens_per_s);
  world_->set_step(metrics.step);
}

void MetricLog::print(const observe::StepMetrics& metrics) {
  const bool last = metrics.step == options_.steps;
  if (metrics.step == 1 || metrics.step % options_.log_every == 0 || last) {
    progress_->line(observe::titan_line(metrics, world_->size()));
  }
  if (metrics.eval_loss) {
    progress_->line(
        fmt::format("validate step: {:2}  loss: {:7.4f}", metrics.step, *metrics.eval_loss));
  }
  if (metrics.skipped) {
    progress_->line(
        fmt::format("step: {:2}  left out: a gradient overflowed; the loss scale was {}",
                    metrics.step, *metrics.loss_scale));
  }
}

void MetricLog::stalled(std::optional<double> seconds) {
  stall_s_ = seconds;
}

void MetricLog::end() {
  if (!is_main() || !stall_s_ || history_.empty()) {
    return;
  }
  std::optional<double>& stall = history_.back().checkpoint_stall_s;
  stall = stall.value_or(0) + *std::exchange(stall_s_, std::nullopt);
  if (writer_) {
    writer_->write_again(history_.back());
  }
}

void MetricLog::line(const std::string& text) {
  if (is_main()) {
    progress_->line(text);
  }
}

}  // namespace tessera::training
