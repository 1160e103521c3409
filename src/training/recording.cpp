// Recording of the metrics and the profile of training steps.

#include "tessera/training/recording.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iostream>
#include <system_error>
#include <tuple>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::training {

MetricLog::MetricLog(MetricOptions options, comm::WorldPtr world)
    : options_(std::move(options)), world_(std::move(world)) {}

void MetricLog::open(std::int64_t done) {
  if (!is_main()) {
    return;
  }
  if (!options_.metrics.empty()) {
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
  if (writer_) {
    writer_->write(metrics);
  }
  if (tensorboard_) {
    auto scalars = observe::titan_scalars(metrics, world_->size(), options_.device);
    scalars.emplace_back("n_tokens_seen", static_cast<double>(tokens));
    tensorboard_->write(metrics.step, scalars);
  }
  print(metrics);
  world_->set_step(metrics.step);
}

void MetricLog::print(const observe::StepMetrics& metrics) {
  const bool last = metrics.step == options_.steps;
  if (metrics.step == 1 || metrics.step % options_.log_every == 0 || last) {
    line(observe::titan_line(metrics, world_->size()));
  }
  if (metrics.eval_loss) {
    line(fmt::format("validate step: {:2}  loss: {:7.4f}", metrics.step, *metrics.eval_loss));
  }
  if (metrics.skipped) {
    line(fmt::format("step: {:2}  left out: a gradient overflowed; the loss scale was {}",
                     metrics.step, *metrics.loss_scale));
  }
}

void MetricLog::stalled(std::optional<double> seconds) {
  stall_s_ = seconds;
}

void MetricLog::line(const std::string& text) {
  if (is_main()) {
    std::cout << text << std::endl;
  }
}

namespace {

std::filesystem::path file_of_rank(const std::filesystem::path& file, int rank) {
  if (rank == 0) {
    return file;
  }
  std::filesystem::path own = file;
  own.replace_extension(fmt::format("rank{}{}", rank, file.extension().string()));
  return own;
}

/// Throws Error if the metrics file `file` can't be written. Called before the training, so that
/// the error does not come hours later.
void check_can_write(const std::string& option, const std::filesystem::path& file) {
  files::create_folders(std::filesystem::absolute(file).parent_path());
  std::error_code error;
  const std::filesystem::file_status found = std::filesystem::status(file, error);
  TESSERA_CHECK(!std::filesystem::exists(found) || std::filesystem::is_regular_file(found),
                "can't write ", option, " ", file.string(),
                ", which is not a regular file; pass another file name");
  try {
    // Creates a temporary file and removes it, to find out whether the folder is writable.
    const files::AtomicFile probe(file);
  } catch (const Error& unwritable) {
    fail("can't write ", option, " ", file.string(), ": ", unwritable.what());
  }
}

}  // namespace

Recording::Recording(RecordingOptions options) : options_(std::move(options)) {
  if (!options_.profile.empty()) {
    // `profile` becomes absolute: the profile is written at the end, possibly after a chdir().
    options_.profile = files::absolute_path(options_.profile);
  }
}

/// Sets which steps are profiled. `done`: the number of steps that the run made before it was
/// resumed.
void Recording::choose_steps(std::int64_t done, bool is_main) {
  std::tie(first_, last_) = options_.profile_steps;
  if (first_ == 0) {
    first_ = last_ = options_.steps;
  }
  if (done < first_) {
    return;
  }
  first_ = done + 1;
  const bool none = first_ > last_;
  if (is_main) {
    std::cerr << fmt::format(
        "{}: warning: {}profile: the run continues after step {}, and {}\n", options_.names.program,
        options_.names.dashes, done,
        none ? "writes no profile" : fmt::format("profiles steps {}:{}", first_, last_));
  }
  first_ = none ? 0 : first_;
}

void Recording::begin(const comm::World& world, std::int64_t done) {
  if (options_.profile.empty()) {
    return;
  }
  choose_steps(done, world.rank() == 0);
  if (first_ > 0) {
    file_ = file_of_rank(options_.profile, world.rank());
    check_can_write(options_.names.dashes + "profile", file_);
  }
}

observe::StepMetrics Recording::run(const TrainState& state,
                                    const std::function<observe::StepMetrics()>& make) {
  const std::int64_t step = state.step + 1;
  if (first_ == 0 || step < first_ || step > last_) {
    return make();
  }
  if (step == first_) {
    profile_ = std::make_unique<observe::Profile>(c10::Device(options_.device), &state.model);
  }
  observe::StepMetrics metrics = make();
  if (step == last_) {
    try {
      profile_->write(file_);
    } catch (const Error& error) {
      std::cerr << fmt::format("{}: warning: {}profile was not written: {}\n",
                               options_.names.program, options_.names.dashes, error.what());
    }
    profile_.reset();
  }
  return metrics;
}

}  // namespace tessera::training
