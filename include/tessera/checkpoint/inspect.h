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

namespace tessera::checkpoint {

/// Returns `path` if `path` is a step folder, else the newest step folder in `path`. Throws Error
/// if there is no step folder.
std::filesystem::path find_step(const std::filesystem::path& path);

// Functions that inspect sharded checkpoints in one process, without loading whole tensors.

/// Returns several lines of text about a step: its run, its mesh, its JSON entries and its tensors.
/// Throws Error for an invalid manifest.
std::string describe_step(const std::filesystem::path& step);

/// Verifies the checksums of all bytes of a step. Returns one line per fault, with the file, the
/// offset and the tensors. Throws Error for an invalid manifest.
std::vector<std::string> verify_step(const std::filesystem::path& step);

/// Compares the names, sizes, dtypes and values of the tensors of two steps. Returns one line per
/// difference. The steps can come from different meshes. Throws Error for an invalid step or a
/// wrong checksum.
std::vector<std::string> compare_steps(const std::filesystem::path& step,
                                       const std::filesystem::path& other);

// Functions that find the step from which a training run continues.

/// Makes a new, unique run_id (SaveOptions::run_id) on rank 0 and broadcasts the run_id. Collective
/// over `world`.
std::string new_run_id(comm::World& world);

/// Returns the run_id of a complete step. Collective over `world`. Throws Error if the step does
/// not exist, or if `dir` has a complete step of another run.
std::string run_of_step(comm::World& world, const std::filesystem::path& dir, std::int64_t step);

/// Returns the highest complete step in `dir` with a number below `before`, or nullopt. Collective
/// over `world`.
std::optional<std::int64_t> newest_step(comm::World& world, const std::filesystem::path& dir,
                                        std::optional<std::int64_t> before = std::nullopt);

}  // namespace tessera::checkpoint
TESSERA_API_END
