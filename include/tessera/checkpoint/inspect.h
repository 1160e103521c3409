#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/find_step.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

// Sharded checkpoints seen from outside, without ranks and without loading a tensor.

/// What a step holds, in lines to be read: its run, mesh and entries, and its tensors. Throws Error
/// for a manifest that is not valid.
std::string describe_step(const std::filesystem::path& step);

/// Called with the number of bytes read so far, and of all.
using Progress = std::function<void(std::uint64_t done, std::uint64_t all)>;

/// Reads every byte of a step, a MiB at a time, and compares it with the manifest. What is wrong: a
/// line each, which names the file, the place and the tensors there. Throws Error for a manifest
/// that is not valid.
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
