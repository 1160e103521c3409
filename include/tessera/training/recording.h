#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/observe/detail/metrics_output.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/profile.h"
#include "tessera/observe/tensorboard.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/step.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// Options of MetricLog: where a run's metrics are written.
struct MetricOptions {
  std::filesystem::path metrics = {};      ///< JSONL file for the metrics; empty: no file
  std::filesystem::path tensorboard = {};  ///< folder for TensorBoard files; empty: none
  std::int64_t steps = 0;                  ///< number of steps of the whole run
  std::int64_t log_every = 10;             ///< number of steps between two lines on the console
  std::string device = "cpu";              ///< the device of the run: "cpu" or "cuda"
};

/// Writes a run's metrics to the console, to a file and for TensorBoard. Only rank 0 writes. On
/// other ranks all methods do nothing. Not collective.
class MetricLog {
 public:
  MetricLog(MetricOptions options, comm::WorldPtr world);
  /// Opens the files. A run that continues after `done` steps retains the records of these steps.
  /// Throws Error if a file can't be written.
  void open(std::int64_t done);
  /// Writes the metrics of a step. `tokens` is the number of tokens of all steps so far, for
  /// TensorBoard.
  void write(observe::StepMetrics metrics, std::int64_t tokens);
  /// Adds the seconds that training waited for a checkpoint to the metrics of the next step.
  void stalled(std::optional<double> seconds);
  /// Prints a line on the console, on rank 0.
  void line(const std::string& text);

 private:
  bool is_main() const { return world_->rank() == 0; }
  void print(const observe::StepMetrics& metrics);

  MetricOptions options_;
  comm::WorldPtr world_;
  std::unique_ptr<observe::MetricsWriter> writer_;
  std::unique_ptr<observe::TensorBoardWriter> tensorboard_;
  std::optional<double> stall_s_;
};

/// Options of Recording: which steps of a run the profiler records.
struct RecordingOptions {
  /// The file of rank 0's profile (observe::Profile). For p.json, rank 3 writes p.rank3.json in the
  /// same folder. Empty: no profile.
  std::filesystem::path profile = {};
  /// The first and the last step to profile, from 1; {0, 0}: the last step.
  std::pair<std::int64_t, std::int64_t> profile_steps = {};
  std::int64_t steps = 0;      ///< number of steps of the whole run
  std::string device = "cpu";  ///< the device of the run: "cpu" or "cuda"
  RunNames names = {};
};

/// Profiles some steps of a run. Every rank must be its own process, because libtorch has one
/// profiler per process.
class Recording {
 public:
  explicit Recording(RecordingOptions options);

  /// Prepares the recording; call before the first step. `done`: the number of steps that a resumed
  /// run made before its restart. Throws Error if the file can't be written.
  void begin(const comm::World& world, std::int64_t done);
  /// Runs `make`, the next step of `state`, and profiles this step if requested. Collective if the
  /// step is collective. Prints a warning if the profile cannot be written.
  observe::StepMetrics run(const TrainState& state,
                           const std::function<observe::StepMetrics()>& make);

 private:
  void choose_steps(std::int64_t done, bool is_main);

  RecordingOptions options_;
  std::filesystem::path file_;
  std::int64_t first_ = 0, last_ = 0;
  std::unique_ptr<observe::Profile> profile_;
};

}  // namespace tessera::training
TESSERA_API_END
