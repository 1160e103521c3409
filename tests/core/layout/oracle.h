#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"

namespace tessera::testing {

using Indices = std::vector<std::int64_t>;

/// Converts a dimension or an index to std::size_t, for the index operator of std::vector.
constexpr std::size_t pos(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// Returns chunk `index` of a list, split as torch.chunk does: a chunk has ceil(n / parts)
/// elements, and the last chunks have fewer or none.
Indices chunk(const Indices& list, std::int64_t parts, std::int64_t index);

/// Returns the indices of dimension `dim` that PyTorch gives to `coordinate` under a placement
/// list. The placements split arange(size) in mesh order; a strided shard first cuts the list into
/// split_factor pieces, splits each piece into chunks, and joins the chunks of this coordinate.
Indices torch_indices(const Placements& placements, const Indices& mesh_sizes, int dim,
                      std::int64_t size, const Indices& coordinate);

/// Returns the indices along tensor dimension `dim` that `layout` gives to mesh coordinate
/// `coordinate`.
Indices layout_indices(const Layout& layout, int dim, std::int64_t size, const Indices& coordinate);

/// Returns all coordinates of a mesh, in row-major order.
std::vector<Indices> coordinates(const Indices& mesh_sizes);

/// Returns every list of `length` values in [0, base), in lexicographic order.
std::vector<std::vector<int>> all_lists(int length, int base);

/// Returns the integers among the words of `text`.
Indices numbers_in(const std::string& text);

/// Parses placements in PyTorch's notation: "[Shard(0), _StridedShard(dim=1, sf=2)]".
Placements placements_in(const std::string& text);

}  // namespace tessera::testing
