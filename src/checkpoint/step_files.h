// The files of a step, and folders of shards that PyTorch has written without a manifest.

#pragma once

#include <filesystem>
#include <string>

#include "manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/export.h"

namespace tessera::checkpoint {

/// Throws Error for a file that is missing or of another size, and for a header that differs from
/// the one written.
SafetensorsFile open_file_of_step(const std::filesystem::path& folder, const FileRecord& record);

/// Throws Error unless a file has a chunk of a tensor as the manifest says.
void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk);

}  // namespace tessera::checkpoint

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Whether a folder has what PyTorch's HuggingFaceStorageWriter writes with save_distributed:
/// shards without a manifest, and without the marker of an unfinished save of ours.
bool has_torch_hf_shards(const std::filesystem::path& folder);

/// Throws Error for a folder in torch.distributed.checkpoint's own format, whose pickles are not
/// read here. The message names a converter.
void refuse_torch_checkpoint(const std::filesystem::path& folder);

/// A manifest made from those shards, without checksums. A missing last shard can't be
/// distinguished from a smaller tensor. Throws Error for files that are not valid, that do not say
/// where their blocks are, or that a save of ours has written, whose manifest is missing, and for
/// blocks that overlap or leave holes.
Manifest manifest_of_shards(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
