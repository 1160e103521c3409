#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/module_watch.h"
#include "tessera/observe/step_trace.h"
#include "tessera/training/run_names.h"
#include "tessera/training/train_state.h"

TESSERA_API_BEGIN
namespace tessera::training {

class MemoryWatch;

/// Steps, as the metrics count them, both included.
struct StepRange {
  std::int64_t first = 0, last = 0;
};

/// What a run records of its steps beside the metrics. Files: empty for none.
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
