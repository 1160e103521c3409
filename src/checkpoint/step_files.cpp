#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "format.h"
#include "manifest.h"
#include "step_files.h"
#include "step_folder.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {

/// The size of the file is checked before the header: a file of another size is truncated, or is a
/// different file.
SafetensorsFile open_file_of_step(const std::filesystem::path& folder, const FileRecord& record) {
  const std::filesystem::path path = folder / record.name;
  std::error_code error;
  const auto found = std::filesystem::file_size(path, error);
  if (error) {
    throw detail::ReadError(
        detail::concat("the file '", path.string(), "' of the step can't be looked at: ",
                       error.message(), ": copy the whole folder, or load another step"),
        error == std::errc::no_such_file_or_directory ? path : std::filesystem::path());
  }
  if (found != record.bytes) {
    const files::InputFile refuses_lfs_pointers(path, "a file of a step", Symlinks::kRefuse);
  }
  TESSERA_CHECK(found == record.bytes, "'", path.string(), "' has ", found,
                " bytes, but the manifest says ", record.bytes,
                ": copy it again, or load another step");
  return SafetensorsFile(path, Symlinks::kRefuse, record.sums);
}

void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk) {
  const TensorEntry& entry = file.entry(name);
  TESSERA_CHECK(entry.dtype_name == tensor.dtype && entry.sizes == chunk.sizes, "tensor '", name,
                "' of '", file.path().string(), "' is ", entry.dtype_name,
                fmt::format(" [{}], but the manifest says ", fmt::join(entry.sizes, ", ")),
                tensor.dtype, fmt::format(" [{}]", fmt::join(chunk.sizes, ", ")),
                ": copy the step again, or load another");
}

namespace {

std::vector<std::string> shard_files(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (is_shard_name(entry.path().filename().string())) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::ranges::sort(names);
  return names;
}

std::vector<std::int64_t> offsets_of(const std::string& tensor, const nlohmann::json& info) {
  try {
    return natural_numbers(info.at("saved_offsets"), "its saved_offsets");
  } catch (const Error& error) {
    fail("tensor '", tensor, "': ", error.what());
  }
}

/// Adds the blocks of one file to a manifest. The sizes of a tensor are the maximum extent of its
/// blocks.
void add_blocks(Manifest& manifest, const SafetensorsFile& file) {
  const auto metadata = file.metadata().find("DCP_SHARDING_INFO");
  TESSERA_CHECK(metadata != file.metadata().end(), "it has no DCP_SHARDING_INFO");
  const nlohmann::json info = detail::parse_strict_json(metadata->second);
  for (const auto& [name, entry] : file.tensors()) {
    TESSERA_CHECK(info.contains(name), "its DCP_SHARDING_INFO lacks tensor '", name, "'");
    ManifestChunk chunk{manifest.files.size(), offsets_of(name, info[name]), entry.sizes};
    ManifestTensor& tensor = manifest.tensors[name];
    TESSERA_CHECK(chunk.offset.size() == chunk.sizes.size() &&
                      (tensor.chunks.empty() || (tensor.dtype == entry.dtype_name &&
                                                 tensor.sizes.size() == chunk.sizes.size())),
                  "tensor '", name, "' has other dimensions or another type than elsewhere");
    tensor.dtype = entry.dtype_name;
    tensor.sizes.resize(chunk.sizes.size());
    for (std::size_t dim = 0; dim < chunk.sizes.size(); ++dim) {
      std::int64_t end = 0;
      TESSERA_CHECK(!__builtin_add_overflow(chunk.offset[dim], chunk.sizes[dim], &end), "tensor '",
                    name, "' begins at ", chunk.offset[dim]);
      tensor.sizes[dim] = std::max(tensor.sizes[dim], end);
    }
    tensor.chunks.push_back(std::move(chunk));
  }
}

/// Whether a save by Tessera wrote a shard. PyTorch's writer, but not Tessera, records its version
/// in a shard.
bool is_of_a_save(const SafetensorsFile& file) {
  return file.metadata().contains("format") && !file.metadata().contains("DCP_VERSION");
}

}  // namespace

bool has_torch_hf_shards(const std::filesystem::path& folder) {
  std::error_code error;
  return !std::filesystem::exists(folder / kManifestFile, error) && !is_marked(folder) &&
         !shard_files(folder).empty();
}

void refuse_torch_checkpoint(const std::filesystem::path& folder) {
  std::error_code error;
  TESSERA_CHECK(
      !std::filesystem::exists(folder / ".metadata", error), "'", folder.string(),
      "' is a checkpoint of torch.distributed.checkpoint, .metadata and .distcp files, ",
      "whose pickles only PyTorch reads: convert it with from_torch_checkpoint.py, which is ",
      "installed beside tessera-ckpt, and load its output (docs/checkpoints.md)");
}

Manifest manifest_of_shards(const std::filesystem::path& folder) {
  Manifest manifest;
  bool of_a_save = false;
  for (const std::string& name : shard_files(folder)) {
    const SafetensorsFile file(folder / name, Symlinks::kRefuse);
    try {
      add_blocks(manifest, file);
    } catch (const nlohmann::json::exception& error) {
      fail("'", (folder / name).string(),
           "' has a DCP_SHARDING_INFO that is not valid: ", error.what(), ": write it again");
    } catch (const Error& error) {
      fail("'", (folder / name).string(), "' is no shard of a checkpoint: ", error.what(),
           ": write it again with save_distributed");
    }
    of_a_save = of_a_save || is_of_a_save(file);
    manifest.files.push_back({name, std::filesystem::file_size(folder / name), {}});
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    try {
      check_tiling(tensor);
    } catch (const Error& error) {
      fail("the shards in '", folder.string(), "' are not complete: tensor '", name,
           "': ", error.what(), ": copy all of them");
    }
  }
  TESSERA_CHECK(!of_a_save, "'", folder.string(), "' has the shards of a step, but no ",
                kManifestFile,
                ", without which some of them may be missing: copy the whole folder");
  return manifest;
}

}  // namespace tessera::checkpoint
