// Blocks of tensors: where their elements lie in a row-major file, and which of them this rank has.
// Reading, writing and gathering all work on such blocks, so that no rank needs a whole tensor in
// memory.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// How many elements a block of these sizes has.
std::int64_t product(std::span<const std::int64_t> sizes);

/// Throws Error unless the block [offset, offset + block) lies inside a tensor of `sizes`.
void check_block(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                 std::span<const std::int64_t> block);

/// Calls `visit(element, count)` for each contiguous run of the block [offset, offset + block) of a
/// row-major tensor of `sizes`, in order: the longest runs there are. Not for an empty block.
void for_each_run(std::span<const std::int64_t> sizes, std::span<const std::int64_t> offset,
                  std::span<const std::int64_t> block,
                  const std::function<void(std::int64_t element, std::int64_t count)>& visit);

/// Large blocks go between memory and files piece by piece, so that the copies that are made on the
/// way (to the host, to another type) stay small.
inline constexpr std::int64_t kMostPieceBytes = std::int64_t{32} << 20;

/// Calls `visit(offset, sizes)` for pieces of a block of `sizes`, in row-major order, each of at
/// most `most_elements`: ranges of rows or, where a row is larger, of what is within it. A scalar
/// is one piece, an empty block none.
void for_each_piece(std::span<const std::int64_t> sizes, std::int64_t most_elements,
                    const std::function<void(std::span<const std::int64_t> offset,
                                             std::span<const std::int64_t> sizes)>& visit);

/// The place `by` further than `from`, in each dimension.
std::vector<std::int64_t> moved(std::span<const std::int64_t> from,
                                std::span<const std::int64_t> by);

/// The blocks of a tensor that this rank has: all of a plain one; none off the mesh.
std::vector<Box> owned_blocks(const at::Tensor& tensor);
/// The block [offset, offset + sizes) of a tensor in memory: a view.
at::Tensor block_at(const at::Tensor& tensor, std::span<const std::int64_t> offset,
                    std::span<const std::int64_t> sizes);
/// The part of a local tensor that a box describes: a view.
at::Tensor local_block(const at::Tensor& local, const Box& box);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
