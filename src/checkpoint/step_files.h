// The files of a step, and folders of shards that PyTorch has written without a manifest.

#pragma once

#include <filesystem>
#include <string>

#include "manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/export.h"

namespace tessera::checkpoint {

/// Opens a file of a step. Throws Error for a file that is missing or of another size, and for a
/// header whose bytes do not match their checksum.
SafetensorsFile open_file_of_step(const std::filesystem::path& folder, const FileRecord& record);

/// Throws Error unless `file` has the chunk of the tensor `name` that the manifest describes.
void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk);

}  // namespace tessera::checkpoint

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Whether a folder was written by PyTorch's HuggingFaceStorageWriter with save_distributed:
/// whether the folder has shards, but no manifest and no marker of an unfinished Tessera save.
bool has_torch_hf_shards(const std::filesystem::path& folder);

/// Throws Error for a folder in the format of torch.distributed.checkpoint, because Tessera does
/// not read pickles. The message names a converter.
void refuse_torch_checkpoint(const std::filesystem::path& folder);

/// Makes a manifest, without checksums, from the shards of PyTorch. A missing last shard cannot be
/// detected: the tensor then looks smaller. Throws Error for invalid files, for files without block
/// offsets, for files of a Tessera save whose manifest is missing, and for blocks that overlap or
/// leave holes.
Manifest manifest_of_shards(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
