#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/observe/memory_log.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// The memory of one rank in one step.
struct RankMemory {
  std::int64_t step = 0;
  std::string place{};                   ///< the rank's, in the mesh: "dp=0, tp=1"
  std::optional<StepMemory> tensors{};   ///< on the host, by unit and kind; nullopt: not counted
  std::int64_t peak_reserved_bytes = 0;  ///< by libtorch on a GPU; on a CPU resident, so far
  std::optional<std::int64_t> peak_active_bytes{};  ///< what tensors had of it
};

/// Writes the memory of all ranks as JSON, from rank 0: {"ranks": [{rank, place, step,
/// peak_reserved_bytes, peak_active_bytes, peak_bytes, peak_moment, kinds, units}]}. `kinds` has
/// {at_peak, most} in bytes by kind, `units` the same by unit; what belongs to none is in "". The
/// last four are null where tensors are not counted. Collective over the world. Throws Error where
/// the file can't be written.
void write_memory_report(const std::filesystem::path& path, comm::World& world,
                         const RankMemory& memory);

}  // namespace tessera::observe
TESSERA_API_END
