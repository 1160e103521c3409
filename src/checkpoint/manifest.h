// manifest.json: what a step contains and where, with checksums of every byte, its own included.

#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

inline constexpr const char* kManifestFile = "manifest.json";

/// A file of a step.
struct FileRecord {
  std::string name;
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> sums;  ///< CRC-32C of each MiB; none in shards of PyTorch's
};

/// A block of a tensor, and the file that has it.
struct ManifestChunk {
  std::size_t file = 0;  ///< in Manifest::files
  std::vector<std::int64_t> offset, sizes;
};

/// A tensor of a step: its chunks cover it, each element once.
struct ManifestTensor {
  std::string dtype;  ///< safetensors' name
  std::vector<std::int64_t> sizes;
  std::vector<std::string> tied;  ///< its other names
  std::vector<ManifestChunk> chunks;
};

struct Manifest {
  std::string run_id;
  std::int64_t step = 0;
  int world_size = 0;
  std::vector<std::int64_t> mesh_sizes = {};  ///< that the step was saved on; empty: on none
  std::vector<std::string> mesh_names = {};
  std::vector<FileRecord> files = {};
  std::map<std::string, ManifestTensor> tensors = {};
  nlohmann::json entries = nlohmann::json::object();
  nlohmann::json stateful = nlohmann::json::object();       ///< states by name
  nlohmann::json rank_states = nlohmann::json::object();    ///< lists of each rank's, by name
  nlohmann::json dropout_calls = nlohmann::json::object();  ///< how often each was called, by FQN
};

/// Whether a file has a name that saves give: "shard-00000-model-00001-of-00002.safetensors".
bool is_shard_name(std::string_view name);

std::string to_text(const Manifest& manifest);

/// Whether a manifest's files may lack checksums: those of other writers may.
enum class Checksums { kRequired, kOptional };

/// Whether the text of a manifest has the checksum that it ends with.
bool is_as_written(std::string_view text);

/// Throws Error, naming `path`, for a text that is not a valid manifest: another checksum, unknown
/// versions, names that lead out of the folder, files without checksums, chunks that overlap or
/// leave holes.
Manifest parse_manifest(const std::string& text, const std::filesystem::path& path,
                        Checksums checksums = Checksums::kRequired);

/// The text of the manifest of a step's folder. Throws Error where that is a symbolic link.
std::string read_manifest_text(const std::filesystem::path& folder);
Manifest read_manifest(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

/// The overlap of two blocks of one tensor; nullopt: none. `local_offset` of the result counts from
/// the start of the second.
std::optional<Box> common_block(std::span<const std::int64_t> offset,
                                std::span<const std::int64_t> sizes,
                                std::span<const std::int64_t> other_offset,
                                std::span<const std::int64_t> other_sizes);

/// Throws Error unless the chunks of a tensor, which lie within it, cover each element once.
void check_tiling(const ManifestTensor& tensor);

}  // namespace tessera::checkpoint
