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
#include "tessera/observe/detail/progress.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/profile.h"
#include "tessera/observe/tensorboard.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/step.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// The outputs of a run's metrics.
struct MetricOptions {
  std::filesystem::path metrics = {};      ///< a JSONL file; empty: none
  std::filesystem::path tensorboard = {};  ///< a folder; empty: none
  std::int64_t steps = 0;                  ///< of the whole run
  std::int64_t log_every = 10;             ///< steps from one line on the console to the next
  std::string device = "cpu";              ///< or "cuda"
};

/// The metrics of a run on the console, in a file and for TensorBoard. Rank 0 writes; on the other
/// ranks every method does nothing. Not collective.
class MetricLog {
 public:
  MetricLog(MetricOptions options, comm::WorldPtr world);
  /// Opens the files. A run that continues after `done` steps keeps their records. Throws Error if
  /// a file can't be written.
  void open(std::int64_t done);
  /// After a step. `tokens`: those of all steps so far, for TensorBoard.
  void write(observe::StepMetrics metrics, std::int64_t tokens);
  /// How long training waited for a checkpoint, for the metrics of the next step.
  void stalled(std::optional<double> seconds);
  /// After the last step: a wait that was not written goes to the metrics of the last step.
  void end();
  /// A line on the console, above the progress line.
  void line(const std::string& text);

 private:
  bool is_main() const { return world_->rank() == 0; }
  void print(const observe::StepMetrics& metrics);

  MetricOptions options_;
  comm::WorldPtr world_;
  std::unique_ptr<observe::MetricsWriter> writer_;
  std::unique_ptr<observe::TensorBoardWriter> tensorboard_;
  std::unique_ptr<observe::Progress> progress_;
  std::optional<double> stall_s_;
  std::optional<observe::StepMetrics> last_;  ///< the last one that was written
};

/// Steps, as the metrics count them, both included.
struct StepRange {
  std::int64_t first = 0, last = 0;
};

/// What a run records of its steps besides the metrics.
struct RecordingOptions {
  /// The file of rank 0's profile (observe::Profile); rank 3 writes p.rank3.json beside p.json.
  /// Empty: no profile.
  std::filesystem::path profile = {};
  StepRange profile_steps = {};  ///< {0, 0}: the last step
  std::int64_t steps = 0;        ///< of the whole run
  std::string device = "cpu";    ///< or "cuda"
  RunNames names = {};
};

/// Profiles some steps of a run. The ranks are processes: libtorch has one profiler a process.
class Recording {
 public:
  explicit Recording(RecordingOptions options);

  /// Call it before the first step, `done` steps after the run's begin. Throws Error if the file
  /// can't be written.
  void begin(const comm::World& world, std::int64_t done);
  /// Makes the next step of `state`, and records it if requested. Collective, as the step is. A
  /// profile that can't be written by now is a warning.
  observe::StepMetrics run(const TrainState& state,
                           const std::function<observe::StepMetrics()>& make);

 private:
  StepRange steps_left(std::int64_t done, bool is_main) const;

  RecordingOptions options_;
  std::filesystem::path file_;  ///< this rank's
  StepRange steps_;             ///< that are profiled; {0, 0}: none
  std::unique_ptr<observe::Profile> profile_;
};

}  // namespace tessera::training
TESSERA_API_END
