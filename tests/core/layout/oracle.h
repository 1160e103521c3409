#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"

namespace tessera::testing {

using Indices = std::vector<std::int64_t>;

/// A mesh or tensor dimension, or a position, as an index of a std::vector.
constexpr std::size_t pos(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// Piece `index` of torch.chunk of a list: pieces have ceil(n / parts) elements, trailing ones
/// fewer or none.
Indices chunk(const Indices& list, std::int64_t parts, std::int64_t index);

/// The indices of dimension `dim` that PyTorch gives to `coordinate` under a placement list.
/// Placements are applied to arange(size) in mesh order; a strided shard cuts it in split_factor
/// pieces, chunks each and joins the chunks.
Indices torch_indices(const Placements& placements, const Indices& mesh_sizes, int dim,
                      std::int64_t size, const Indices& coordinate);

/// The global indices of a dimension that a layout gives to `coordinate`: an index belongs to it if
/// each digit of the index is in the coordinate's nested chunk.
Indices layout_indices(const Layout& layout, int dim, std::int64_t size, const Indices& coordinate);

/// All coordinates of a mesh, row-major.
std::vector<Indices> coordinates(const Indices& mesh_sizes);

/// Every list of `length` values in [0, base), in lexicographic order.
std::vector<std::vector<int>> all_lists(int length, int base);

/// The numbers among the words of a text.
Indices numbers_in(const std::string& text);

/// "[Shard(0), _StridedShard(dim=1, sf=2)]": a placement ends with its closing parenthesis.
Placements placements_in(const std::string& text);

}  // namespace tessera::testing
