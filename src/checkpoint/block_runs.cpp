#include "block_runs.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using Sizes = std::span<const std::int64_t>;

std::int64_t product(Sizes sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

/// Elements between neighbours along each dimension of a row-major tensor.
std::vector<std::int64_t> row_major_strides(Sizes sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * sizes[dim];
  return strides;
}

/// Number of leading dimensions that a run steps over: those behind the last of them are whole,
/// except for the first, which may be a range.
std::size_t outer_dims(Sizes sizes, Sizes block) {
  std::size_t dim = sizes.size();
  while (dim > 0 && block[dim - 1] == sizes[dim - 1]) --dim;
  return dim == 0 ? 0 : dim - 1;
}

/// Steps `index` through `block` in row-major order; false after the last.
bool advance(std::vector<std::int64_t>& index, Sizes block) {
  for (std::size_t dim = index.size(); dim-- > 0;) {
    if (++index[dim] < block[dim]) return true;
    index[dim] = 0;
  }
  return false;
}

}  // namespace

void check_block(Sizes sizes, Sizes offset, Sizes block) {
  TESSERA_CHECK(offset.size() == sizes.size() && block.size() == sizes.size(), "a block of ",
                block.size(), " dimensions was asked for of a tensor of ", sizes.size());
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    TESSERA_CHECK(offset[dim] >= 0 && block[dim] >= 0 && block[dim] <= sizes[dim] &&
                      offset[dim] <= sizes[dim] - block[dim],
                  "positions [", offset[dim], ", ", offset[dim], " + ", block[dim],
                  ") of dimension ", dim, " were asked for, which has ", sizes[dim]);
  }
}

void for_each_run(Sizes sizes, Sizes offset, Sizes block,
                  const std::function<void(std::int64_t, std::int64_t)>& visit) {
  if (std::find(block.begin(), block.end(), 0) != block.end()) return;
  const auto strides = row_major_strides(sizes);
  const auto outer = outer_dims(sizes, block);
  const auto count = product(block.subspan(outer));
  const auto first =
      std::inner_product(offset.begin(), offset.end(), strides.begin(), std::int64_t{0});
  std::vector<std::int64_t> index(outer, 0);
  do {
    visit(std::inner_product(index.begin(), index.end(), strides.begin(), first), count);
  } while (advance(index, block.first(outer)));
}

}  // namespace tessera::checkpoint
