// Functions that find the saved steps and the unfinished saves in the folder of a training run, and
// that mark saved steps as unfinished.

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::checkpoint::detail {

/// Returns the folder name of a step inside the run's folder: "step-00000100".
std::string step_folder_name(std::int64_t step);

/// Returns the run_id of the newest unfinished save in `dir`, or nullopt if there is none. Rank 0
/// reads the folder and broadcasts the result. Collective over `world`.
std::optional<std::string> unfinished_run(comm::World& world, const std::filesystem::path& dir);

/// Returns the highest step number in `dir`, or nullopt if there are no steps. Counts damaged
/// steps, but not unfinished saves. Collective over `world`.
std::optional<std::int64_t> last_step(comm::World& world, const std::filesystem::path& dir);

/// Returns the steps in `dir` with numbers above `after`, including damaged steps. `after`: the
/// step from which the run continues, or -1. The run must call withdraw_step() for these steps
/// before saving. Collective over `world`. Throws Error if a step or an unfinished save belongs to
/// another run or is unreadable.
std::vector<std::int64_t> steps_to_withdraw(comm::World& world, const std::filesystem::path& dir,
                                            std::int64_t after, const std::string& run_id);

/// Removes the manifest of a damaged step, so that the step counts as an unfinished save of this
/// run. Call on one rank. Throws Error if the step belongs to another run. The caller must ensure
/// that the folder belongs to this run, because a damaged manifest does not name the run.
void withdraw_step(const std::filesystem::path& dir, std::int64_t step, const std::string& run_id);

}  // namespace tessera::checkpoint::detail
TESSERA_API_END
