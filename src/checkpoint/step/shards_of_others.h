#pragma once

#include <filesystem>

#include "step/manifest.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Whether a folder has what PyTorch's HuggingFaceStorageWriter writes with save_distributed:
/// shards without a manifest, and without the marker of an unfinished save of ours.
bool has_shards_of_others(const std::filesystem::path& folder);

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
