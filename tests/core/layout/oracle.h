#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"

namespace tessera::testing {

using Indices = std::vector<std::int64_t>;

constexpr std::size_t pos(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// Splits `list` into `parts` chunks, as torch.chunk does, and returns chunk `index`. A chunk has
/// ceil(list.size() / parts) elements; the last chunks have fewer elements or none.
Indices chunk(const Indices& list, std::int64_t parts, std::int64_t index);

/// Returns the indices of dimension `dim` that PyTorch gives to `coordinate`. Placements split the
/// indices in mesh order. StridedShard cuts the indices into split_factor pieces, and gives each
/// coordinate one chunk of each piece.
Indices torch_indices(const Placements& placements, const Indices& mesh_sizes, int dim,
                      std::int64_t size, const Indices& coordinate);

/// Returns the indices of tensor dimension `dim` that `layout` gives to the rank at `coordinate`.
Indices layout_indices(const Layout& layout, int dim, std::int64_t size, const Indices& coordinate);

std::vector<Indices> coordinates(const Indices& mesh_sizes);

/// Returns all lists of `length` integers in [0, base), in lexicographic order.
std::vector<std::vector<int>> all_lists(int length, int base);

Indices numbers_in(const std::string& text);

/// Parses placements in PyTorch's notation: "[Shard(0), _StridedShard(dim=1, sf=2)]".
Placements placements_in(const std::string& text);

}  // namespace tessera::testing
