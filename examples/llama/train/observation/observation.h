// What a run records of its steps beside the metrics.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "examples/llama/models.h"
#include "examples/llama/train/observation/memory_watch.h"
#include "examples/llama/train/options/observation_options.h"
#include "tessera/observe/kernel_profile.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/module_watch.h"
#include "tessera/observe/step_trace.h"
#include "tessera/optim/optimizer.h"

namespace llama {

/// The recordings that --trace, --profile and --memory-report ask for; none without them.
class Observation {
 public:
  /// Before the model is made, of which memory is counted.
  explicit Observation(const TrainOptions& options);

  /// `model`: ready for its first forward, `done`: the steps that were made before, of which there
  /// is no trace. Throws tessera::Error on rank 0 where a file can't be written.
  void begin(const tessera::DeviceMesh& mesh, Llama& model, std::int64_t done);
  /// Makes a step and records what is asked for of it. Collective, as the step is. A trace that
  /// can't be written by now is a warning.
  tessera::observe::StepMetrics run(std::int64_t step, const Llama& model,
                                    tessera::optim::Optimizer& optimizer,
                                    const std::function<tessera::observe::StepMetrics()>& make);
  /// Behind the last step. Collective over the world. A report that can't be written is a warning.
  void end(tessera::comm::World& world);

 private:
  bool traces(std::int64_t step) const {
    return trace_ && step >= steps_.first && step <= steps_.last;
  }

  /// run() without its profile.
  tessera::observe::StepMetrics record(std::int64_t step, const Llama& model,
                                       tessera::optim::Optimizer& optimizer,
                                       const std::function<tessera::observe::StepMetrics()>& make);

  const TrainOptions& options_;
  StepRange steps_;                 ///< that are traced; {0, 0}: none
  std::int64_t profiled_step_ = 0;  ///< 0: none
  std::string place_;               ///< of this rank in the mesh
  std::unique_ptr<tessera::observe::ModuleWatch> watch_;
  std::unique_ptr<tessera::observe::StepTrace> trace_;
  std::unique_ptr<MemoryWatch> memory_;
};

}  // namespace llama
