#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/module_watch.h"
#include "tessera/observe/progress.h"
#include "tessera/observe/step_trace.h"
#include "tessera/observe/tensorboard.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/step.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// Where a run's metrics go.
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
  /// Opens the files. A run that goes on after `done` steps keeps what they have of these. Throws
  /// Error where one can't be written.
  void open(std::int64_t done);
  /// After a step. `tokens`: those of all steps so far, for TensorBoard.
  void write(observe::StepMetrics metrics, std::int64_t tokens);
  /// For how long a checkpoint kept training waiting: in the metrics of the next step.
  void stalled(std::optional<double> seconds);
  /// No step comes any more: a stall that is left goes to the metrics of the last one.
  void end();
  /// A line on the console, above the progress line.
  void line(const std::string& text);
  /// The steps so far, those before a resume included; only the last one's traffic. Rank 0 only.
  const std::vector<observe::StepMetrics>& history() const { return history_; }

 private:
  bool is_main() const { return world_->rank() == 0; }
  void print(const observe::StepMetrics& metrics);

  MetricOptions options_;
  comm::WorldPtr world_;
  std::unique_ptr<observe::MetricsWriter> writer_;
  std::unique_ptr<observe::TensorBoardWriter> tensorboard_;
  std::unique_ptr<observe::Progress> progress_;
  std::optional<double> stall_s_;
  std::vector<observe::StepMetrics> history_;
};

class MemoryWatch;

/// Steps, as the metrics count them, both included.
struct StepRange {
  std::int64_t first = 0, last = 0;
};

/// Recordings of a run besides the metrics. Files: empty for none.
struct RecordingOptions {
  std::filesystem::path trace = {};  ///< a Chrome trace of what each rank does in some steps
  StepRange trace_steps = {};        ///< {0, 0}: the second of those that are made
  std::filesystem::path profile =
      {};  ///< what rank 0 does in the last step, by libtorch's profiler
  std::filesystem::path memory_report = {};  ///< observe::write_memory_report()
  std::int64_t steps = 0;                    ///< of the whole run
  std::string device = "cpu";                ///< or "cuda"
  RunNames names = {};
};

/// The recordings that the options ask for; none without them. To be made before the model, of
/// which memory is counted, and to outlive it.
class Recording {
 public:
  explicit Recording(RecordingOptions options);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// With the model ready for its first forward, `done` steps after the run's begin. Throws Error
  /// on rank 0 where a file can't be written.
  void begin(const DeviceMesh& mesh, nn::ModuleBase& model, std::int64_t done);
  /// Makes the next step of `state` and records what is asked for of it. Collective, as the step
  /// is. A trace that can't be written by now is a warning.
  observe::StepMetrics run(const TrainState& state,
                           const std::function<observe::StepMetrics()>& make);
  /// Behind the last step. Collective over the world. A report that can't be written is a warning.
  void end(comm::World& world);

 private:
  bool traces(std::int64_t step) const {
    return trace_ && step >= steps_.first && step <= steps_.last;
  }

  StepRange steps_to_trace(std::int64_t done, bool is_main) const;
  bool has_step_left(std::int64_t done, bool is_main) const;
  void check_can_write(const char* option, const std::filesystem::path& file) const;
  void write_or_warn(const char* option, const std::function<void()>& write) const;
  /// run() without its profile.
  observe::StepMetrics record(std::int64_t step, const TrainState& state,
                              const std::function<observe::StepMetrics()>& make);

  RecordingOptions options_;
  StepRange steps_;                 ///< that are traced; {0, 0}: none
  std::int64_t profiled_step_ = 0;  ///< 0: none
  std::string place_;               ///< of this rank in the mesh
  std::unique_ptr<observe::ModuleWatch> watch_;
  std::unique_ptr<observe::StepTrace> trace_;
  std::unique_ptr<MemoryWatch> memory_;
};

}  // namespace tessera::training
TESSERA_API_END
