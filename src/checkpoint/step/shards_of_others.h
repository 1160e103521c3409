#pragma once

#include <filesystem>

#include "step/manifest.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Whether a folder has what PyTorch's HuggingFaceStorageWriter writes with save_distributed:
/// shards without a manifest, and without the marker of an unfinished save of ours.
bool has_shards_of_others(const std::filesystem::path& folder);

/// Throws Error for a folder that torch.distributed.checkpoint wrote in its own form, whose pickles
/// nothing here reads, with what converts it.
void refuse_torch_checkpoint(const std::filesystem::path& folder);

/// What those say together, as a manifest without checksums. A last shard that is missing can't be
/// told from a smaller tensor. Throws Error for files that are not valid, that do not say where
/// their blocks are, and for blocks that overlap or leave holes.
Manifest manifest_of_shards(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
