// What --memory-report finds out.

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "examples/llama/models.h"
#include "tessera/observe/memory_log.h"
#include "tessera/observe/memory_report.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/optimizer.h"

namespace llama {

/// The memory of the step that takes the most, by unit and kind; the first one, which makes the
/// optimizer's state, counts only where it is alone. On a GPU only what libtorch's
/// allocator says of it. To be made before the model; one in a process.
class MemoryWatch {
 public:
  explicit MemoryWatch(const std::string& device);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  /// What is to be told which module runs.
  tessera::observe::ActivityListener* listener() { return log_ ? &*log_ : nullptr; }
  void begin_step(const Llama& model);
  void end_step(const tessera::observe::StepMetrics& metrics, const Llama& model,
                tessera::optim::Optimizer& optimizer);
  /// Collective over the world of the mesh. `place`: of this rank.
  void write(const std::filesystem::path& path, tessera::comm::World& world,
             const std::string& place);

 private:
  void find_units(const Llama& model);
  void assign_state(const Llama& model, tessera::optim::Optimizer& optimizer);
  std::string unit_of(const std::string& module) const;

  std::optional<tessera::observe::MemoryLog> log_;         ///< on a CPU
  std::map<std::string, std::string, std::less<>> units_;  ///< by the FQN of their modules
  tessera::observe::RankMemory most_;
  std::int64_t steps_ = 0;
};

}  // namespace llama
