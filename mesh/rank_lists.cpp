#include "rank_lists.h"

#include <algorithm>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/transform.hpp>
#include <range/v3/view/zip.hpp>
#include <set>

namespace tessera {

/// The coordinate is taken by value: along `dims` it is overwritten, along all others it stays this
/// rank's.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims) {
  const MeshShape sub(dims | ranges::views::transform([&](int dim) { return shape.size(dim); }) |
                      ranges::to<std::vector>());
  std::vector<int> result;
  for (std::int64_t i = 0; i < sub.numel(); ++i) {
    const auto position = sub.coordinate(i);
    for (const auto& [dim, at] : ranges::views::zip(dims, position)) {
      coordinate[static_cast<std::size_t>(dim)] = at;
    }
    result.push_back(ranks[static_cast<std::size_t>(shape.index(coordinate))]);
  }
  return result;
}

/// By positions in the root instead of coordinates, as the parts need not be dimensions of it
/// (flattened ones, slices of slices).
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own) {
  const auto position = [&](int rank) { return std::ranges::find(root, rank) - root.begin(); };
  // A position in the root is a sum over its dimensions (coordinate times stride), so the offsets
  // of steps along different dimensions add up.
  std::vector<std::ptrdiff_t> positions = {position(own)};
  for (const std::vector<int>& part : parts) {
    std::vector<std::ptrdiff_t> longer;
    for (const std::ptrdiff_t start : positions) {
      for (const int rank : part) {
        longer.push_back(start + position(rank) - position(own));
      }
    }
    positions = std::move(longer);
  }
  const auto size = static_cast<std::ptrdiff_t>(root.size());
  // Parts that share a dimension step along it twice: out of the root, or onto one rank by two
  // ways.
  const bool inside = std::ranges::all_of(positions, [&](auto p) { return p >= 0 && p < size; });
  const bool unique =
      std::set<std::ptrdiff_t>(positions.begin(), positions.end()).size() == positions.size();
  std::vector<int> ranks;
  if (inside && unique) {
    for (const std::ptrdiff_t p : positions) {
      ranks.push_back(root[static_cast<std::size_t>(p)]);
    }
  }
  return ranks;
}

}  // namespace tessera
