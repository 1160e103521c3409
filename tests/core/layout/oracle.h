#pragma once

#include <cstdint>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera::testing {

using Indices = std::vector<std::int64_t>;

/// A mesh or tensor dimension, or a position, as an index of a std::vector.
constexpr std::size_t pos(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// torch.chunk of a list: pieces of ceil(n / parts), trailing ones short or empty; piece `index`.
Indices chunk(const Indices& list, std::int64_t parts, std::int64_t index);

/// What PyTorch gives `coordinate` of dimension `dim` under a placement list: placements are
/// applied to arange(size) in mesh order; a strided shard cuts it in split_factor pieces, chunks
/// each and joins the chunks.
Indices torch_indices(const Placements& placements, const Indices& mesh_sizes, int dim,
                      std::int64_t size, const Indices& coordinate);

/// The global indices that a layout gives `coordinate` of a dimension, found by asking of each
/// index whether every one of its digits lies in the coordinate's nested chunk.
Indices layout_indices(const Layout& layout, int dim, std::int64_t size, const Indices& coordinate);

/// All coordinates of a mesh, row-major.
std::vector<Indices> coordinates(const Indices& mesh_sizes);

/// Every list of `length` values out of [0, base), in lexicographic order.
std::vector<std::vector<int>> all_lists(int length, int base);

}  // namespace tessera::testing
