#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera {

/// Sizes of the local tensor at mesh coordinate `coordinate`. Pure: no communication.
std::vector<std::int64_t> local_sizes(const Layout& layout, std::span<const std::int64_t> sizes,
                                      std::span<const std::int64_t> coordinate);

/// The same for one dimension, whose global size is `size`. Unchecked: for inner loops.
std::int64_t local_size(const Layout& layout, int tensor_dim, std::int64_t size,
                        std::span<const std::int64_t> coordinate);

/// Elements of the local tensor at `coordinate`.
std::int64_t local_numel(const Layout& layout, std::span<const std::int64_t> sizes,
                         std::span<const std::int64_t> coordinate);

/// A contiguous block of the global tensor that a coordinate owns, and where it lies locally.
struct Box {
  std::vector<std::int64_t> global_offset;
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
  friend bool operator==(const Box&, const Box&) = default;
};

/// The blocks of the global tensor at `coordinate`, row-major, empty ones left out. One block,
/// unless a local digit stands in front of a split one.
std::vector<Box> owned_boxes(const Layout& layout, std::span<const std::int64_t> sizes,
                             std::span<const std::int64_t> coordinate);

/// Global index of each local position along `tensor_dim` (length: the local size).
std::vector<std::int64_t> global_indices(const Layout& layout, int tensor_dim, std::int64_t size,
                                         std::span<const std::int64_t> coordinate);

/// Size of chunk `index` when torch.chunk cuts `size` into `chunks`; and its offset.
std::int64_t chunk_size(std::int64_t size, std::int64_t chunks, std::int64_t index);
std::int64_t chunk_offset(std::int64_t size, std::int64_t chunks, std::int64_t index);

}  // namespace tessera
