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

/// Returns the highest step number in `dir`, of a complete or damaged step; nullopt if there is
/// none. Unfinished saves do not count. Rank 0 reads the folder and broadcasts the result.
/// Collective over `world`.
std::optional<std::int64_t> last_step(comm::World& world, const std::filesystem::path& dir);

/// Returns the steps in `dir` with numbers above `after`, including damaged steps. `after` is the
/// step from which a run continues, or -1 for a new run. The run must mark the returned steps as
/// unfinished (withdraw_step()) before the run saves these steps again. Throws Error if one of
/// these steps, or an unfinished save, belongs to another run, has another format version, or
/// cannot be read. Rank 0 reads the folder and broadcasts the result. Collective over `world`.
std::vector<std::int64_t> steps_to_withdraw(comm::World& world, const std::filesystem::path& dir,
                                            std::int64_t after, const std::string& run_id);

/// Marks a damaged step as unfinished: removes the manifest of the step, so that the folder counts
/// as an unfinished save of this run. The run's next complete save deletes the folder; a save of
/// the same step reuses the folder. Throws Error if the step belongs to another run. A damaged
/// manifest does not name its run, so make sure that the folder belongs to this run. To be called
/// on one rank.
void withdraw_step(const std::filesystem::path& dir, std::int64_t step, const std::string& run_id);

}  // namespace tessera::checkpoint::detail
TESSERA_API_END
