#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "step/manifest.h"
#include "tessera/core/layout_math.h"

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
