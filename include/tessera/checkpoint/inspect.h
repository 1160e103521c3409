#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

/// The folder of a step: `path` itself, or the newest step in it. Throws Error if there is none.
std::filesystem::path find_step(const std::filesystem::path& path);

// Sharded checkpoints seen from outside, without ranks and without loading a tensor.

/// A description of a step, in lines: its run, mesh and entries, and its tensors. Throws Error
/// for a manifest that is not valid.
std::string describe_step(const std::filesystem::path& step);

/// Called with the number of bytes read so far, and of all.
using Progress = std::function<void(std::uint64_t done, std::uint64_t all)>;

/// Reads every byte of a step, a MiB at a time, and compares it with the manifest. Returns a line
/// for each fault, which names the file, the offset and the tensors there. Throws Error for a
/// manifest that is not valid.
std::vector<std::string> verify_step(const std::filesystem::path& step,
                                     const Progress& progress = {});

/// What the tensors of two steps differ in, a line each: names, sizes, types, and the largest
/// absolute and relative difference. Reads both, at most 8 MiB at a time; they may have been saved
/// on different meshes. Throws Error for a step that is not valid, and for bytes that are not those
/// that were written.
std::vector<std::string> compare_steps(const std::filesystem::path& step,
                                       const std::filesystem::path& other,
                                       const Progress& progress = {});

}  // namespace tessera::checkpoint
TESSERA_API_END

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::checkpoint {

// The steps of a folder as those of one run: where it continues from, and what is in its way.

/// A run_id that no other run has, drawn by rank 0. Collective over `world`.
std::string new_run_id(comm::World& world);

/// The run_id of a complete step. Throws Error if there is no such step, and if `dir`
/// has a complete step of another run: the message names both. Rank 0 reads the manifests of all
/// steps and broadcasts the result. Collective over `world`.
std::string run_of_step(comm::World& world, const std::filesystem::path& dir, std::int64_t step);

/// The run_id of the newest unfinished save in `dir`; nullopt if there is none. Rank 0 looks and
/// tells the others. Collective over `world`.
std::optional<std::string> unfinished_run(comm::World& world, const std::filesystem::path& dir);

/// The highest complete step in `dir` below `before`; nullopt if there is none. Rank 0 reads the
/// folder and broadcasts the result. Collective over `world`.
std::optional<std::int64_t> newest_step(comm::World& world, const std::filesystem::path& dir,
                                        std::optional<std::int64_t> before = std::nullopt);

/// The highest step in `dir`, complete or damaged, without remains of unfinished saves; nullopt if
/// there is none. Rank 0 reads the folder and broadcasts the result. Collective over `world`.
std::optional<std::int64_t> last_step(comm::World& world, const std::filesystem::path& dir);

/// The steps later than `after`, also damaged ones, that a run which continues from `after` has to
/// withdraw before it saves them again. Throws Error where one of them (or an unfinished save) is
/// another run's, of another version, or cannot be read. A new run passes -1. Rank 0 looks and
/// tells the others. Collective over `world`.
std::vector<std::int64_t> steps_to_withdraw(comm::World& world, const std::filesystem::path& dir,
                                            std::int64_t after, const std::string& run_id);

/// Withdraws a step that was found to be damaged: without its manifest it is the remains of a save
/// of that run. The run's next save removes it once it is complete itself; a save of the same step
/// takes it over. Throws Error if the step is another run's. A step with a damaged manifest counts
/// as this run's, so be sure that the folder is. For one rank.
void withdraw_step(const std::filesystem::path& dir, std::int64_t step, const std::string& run_id);

}  // namespace tessera::checkpoint
TESSERA_API_END
