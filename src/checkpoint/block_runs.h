#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace tessera::checkpoint {

/// Throws Error unless the block [offset, offset + block) lies inside a tensor of `sizes`.
void check_block(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                 std::span<const std::int64_t> block);

/// Calls `visit(element, count)` for each contiguous run of the block [offset, offset + block) of a
/// row-major tensor of `sizes`, in order: the longest runs there are. Not for an empty block.
void for_each_run(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> block,
                  const std::function<void(std::int64_t element, std::int64_t count)>& visit);

}  // namespace tessera::checkpoint
