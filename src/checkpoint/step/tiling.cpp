#include "step/tiling.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <vector>

#include "blocks/blocks.h"
#include "safetensors/format.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// The limit of comparisons of two chunks along one dimension. A grid of 300 × 300 chunks of a
/// matrix needs fewer. It bounds the time for untrusted manifests.
constexpr std::size_t kMostComparisons = 40'000'000;

/// The dimension along which chunks begin at the most different places: then few of them overlap
/// along it.
std::size_t widest_dim(const ManifestTensor& tensor) {
  std::size_t widest = 0;
  std::size_t most = 0;
  for (std::size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    std::set<std::int64_t> begins;
    for (const ManifestChunk& chunk : tensor.chunks) {
      begins.insert(chunk.offset[dim]);
    }
    if (begins.size() > most) {
      widest = dim;
      most = begins.size();
    }
  }
  return widest;
}

}  // namespace

std::optional<Box> common_block(std::span<const std::int64_t> offset,
                                std::span<const std::int64_t> sizes,
                                std::span<const std::int64_t> other_offset,
                                std::span<const std::int64_t> other_sizes) {
  Box box;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const std::int64_t begin = std::max(offset[dim], other_offset[dim]);
    const std::int64_t end =
        std::min(offset[dim] + sizes[dim], other_offset[dim] + other_sizes[dim]);
    if (begin >= end) {
      return std::nullopt;
    }
    box.global_offset.push_back(begin);
    box.local_offset.push_back(begin - other_offset[dim]);
    box.sizes.push_back(end - begin);
  }
  return box;
}

/// With the chunks sorted by their offsets along one dimension, a chunk can overlap only later ones
/// that begin before it ends. If none overlap, they cover the tensor if they have as many elements.
void check_tiling(const ManifestTensor& tensor) {
  tensor_bytes(tensor.sizes, *find_dtype(tensor.dtype));  // throws where a product overflows
  const std::int64_t all = product(tensor.sizes);
  std::int64_t elements = 0;
  for (const ManifestChunk& chunk : tensor.chunks) {
    TESSERA_CHECK(product(chunk.sizes) <= all - elements, "its chunks have more than its ", all,
                  " elements");
    elements += product(chunk.sizes);
  }
  TESSERA_CHECK(elements == all, "its chunks have ", elements, " elements, not ", all);
  if (tensor.sizes.empty()) {
    return;  // a scalar: one chunk of one element
  }
  const std::size_t dim = widest_dim(tensor);
  std::vector<const ManifestChunk*> order;
  for (const ManifestChunk& chunk : tensor.chunks) {
    order.push_back(&chunk);
  }
  std::ranges::sort(order, {}, [dim](const auto* chunk) { return chunk->offset[dim]; });
  std::size_t comparisons = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ManifestChunk& one = *order[i];
    for (std::size_t j = i + 1;
         j < order.size() && order[j]->offset[dim] < one.offset[dim] + one.sizes[dim]; ++j) {
      comparisons += tensor.sizes.size();
      TESSERA_CHECK(comparisons <= kMostComparisons, "its ", order.size(),
                    " chunks take more than ", kMostComparisons,
                    " comparisons to find out whether they overlap");
      TESSERA_CHECK(!common_block(one.offset, one.sizes, order[j]->offset, order[j]->sizes),
                    "two of its chunks overlap");
    }
  }
}

}  // namespace tessera::checkpoint
