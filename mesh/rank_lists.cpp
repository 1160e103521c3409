#include "rank_lists.h"

#include <algorithm>
#include <set>

namespace tessera {

std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims) {
  std::vector<std::int64_t> sizes;
  for (const int dim : dims) {
    sizes.push_back(shape.size(dim));
  }
  const MeshShape sub(sizes);
  std::vector<int> result;
  for (std::int64_t i = 0; i < sub.numel(); ++i) {
    const auto position = sub.coordinate(i);
    for (std::size_t d = 0; d < dims.size(); ++d) {
      coordinate[static_cast<std::size_t>(dims[d])] = position[d];
    }
    result.push_back(ranks[static_cast<std::size_t>(shape.index(coordinate))]);
  }
  return result;
}

std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own) {
  const auto position = [&](int rank) { return std::ranges::find(root, rank) - root.begin(); };
  // Positions in the root are sums over its dimensions, so steps in different ones add up.
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
