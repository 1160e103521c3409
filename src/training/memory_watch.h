// What a memory report has of a run.

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "tessera/nn/module.h"
#include "tessera/observe/memory_log.h"
#include "tessera/observe/memory_report.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/optimizer.h"

namespace tessera::training {

/// The memory of the step that takes the most, by unit and kind; the first one, which makes the
/// optimizer's state, counts only where it is alone. On a GPU only what libtorch's
/// allocator says of it. To be made before the model; one in a process.
class MemoryWatch {
 public:
  explicit MemoryWatch(const std::string& device);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  /// Learns which module runs; nullptr on a GPU.
  observe::ActivityListener* listener() { return log_ ? &*log_ : nullptr; }
  void begin_step(const nn::ModuleBase& model);
  void end_step(const observe::StepMetrics& metrics, const nn::ModuleBase& model,
                optim::Optimizer& optimizer);
  /// Collective over the world of the mesh. `place`: of this rank.
  void write(const std::filesystem::path& path, comm::World& world, const std::string& place);

 private:
  void find_units(const nn::ModuleBase& model);
  void assign_state(const nn::ModuleBase& model, optim::Optimizer& optimizer);
  std::string unit_of(const std::string& module) const;

  std::optional<observe::MemoryLog> log_;                  ///< on a CPU
  std::map<std::string, std::string, std::less<>> units_;  ///< by the FQN of their modules
  observe::RankMemory most_;
  std::int64_t steps_ = 0;
};

}  // namespace tessera::training
