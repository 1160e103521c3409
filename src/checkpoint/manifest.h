// manifest.json of a saved step: the tensors of the step, the files that store these tensors, and
// checksums of every byte, including the bytes of the manifest.

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

#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

inline constexpr const char* kManifestFile = "manifest.json";

struct FileRecord {
  std::string name;
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> sums;  ///< CRC-32C of each MiB of the file; empty for PyTorch's files
};

struct ManifestChunk {
  std::size_t file = 0;  ///< index of the file in Manifest::files
  std::vector<std::int64_t> offset, sizes;
};

/// A tensor of a saved step. Its chunks (stored blocks) cover each element exactly once.
struct ManifestTensor {
  std::string dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> tied;  ///< the other names of a tied parameter
  std::vector<ManifestChunk> chunks;
};

struct Manifest {
  std::string run_id;
  std::int64_t step = 0;
  int world_size = 0;
  /// The sizes of the mesh on which the step was saved; empty if there was no mesh.
  std::vector<std::int64_t> mesh_sizes = {};
  std::vector<std::string> mesh_names = {};
  std::vector<FileRecord> files = {};
  std::map<std::string, ManifestTensor> tensors = {};
  nlohmann::json entries = nlohmann::json::object();
  nlohmann::json stateful = nlohmann::json::object();  ///< states of Stateful objects, by name
  /// The states of RankState objects, by name: a list with one state per rank.
  nlohmann::json rank_states = nlohmann::json::object();
  /// The number of calls of each nn::Dropout, by FQN.
  nlohmann::json dropout_calls = nlohmann::json::object();
};

std::string to_text(const Manifest& manifest);

/// Whether a manifest must have checksums of the files. Shards of PyTorch have no checksums.
enum class Checksums { kRequired, kOptional };

/// Whether the checksum at the end of a manifest's text is correct.
bool is_as_written(std::string_view text);

/// Parses a manifest. Throws Error for a wrong checksum, an unknown version, paths outside the
/// folder, missing file checksums, or blocks that do not cover each element exactly once.
Manifest parse_manifest(const std::string& text, const std::filesystem::path& path,
                        Checksums checksums = Checksums::kRequired);

/// Returns the text of the manifest in the folder of a saved step. Throws Error if the manifest is
/// a symbolic link.
std::string read_manifest_text(const std::filesystem::path& folder);
Manifest read_manifest(const std::filesystem::path& folder);

/// Whether PyTorch's HuggingFaceStorageWriter with save_distributed wrote a folder: the folder has
/// shards, but no manifest and no marker file of an unfinished Tessera save.
bool has_torch_hf_shards(const std::filesystem::path& folder);

/// Throws Error for a folder in the format of torch.distributed.checkpoint, because Tessera does
/// not read pickles. The message names a converter.
void refuse_torch_checkpoint(const std::filesystem::path& folder);

/// Makes a manifest, without checksums, from shard files of PyTorch's writer. A missing last shard
/// of a tensor is not detected. Throws Error for other or invalid files, and for blocks that
/// overlap or leave gaps.
Manifest manifest_of_shards(const std::filesystem::path& folder);

/// Reads the manifest of a saved step, or makes a manifest from the shards of PyTorch's writer.
Manifest manifest_in(const std::filesystem::path& folder);

/// Returns the overlap of two blocks of one tensor, or nullopt. The result's `local_offset` is
/// relative to the start of the second block.
std::optional<Box> common_block(std::span<const std::int64_t> offset,
                                std::span<const std::int64_t> sizes,
                                std::span<const std::int64_t> other_offset,
                                std::span<const std::int64_t> other_sizes);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
