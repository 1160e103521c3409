#include "blocks/blocks.h"

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

using SizesRef = std::span<const std::int64_t>;

/// Elements between neighbours along each dimension of a row-major tensor.
std::vector<std::int64_t> row_major_strides(SizesRef sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t dim = sizes.size(); dim-- > 1;) {
    strides[dim - 1] = strides[dim] * sizes[dim];
  }
  return strides;
}

/// Number of leading dimensions that a run steps over: those behind the last of them are whole,
/// except for the first, which may be a range.
std::size_t outer_dims(SizesRef sizes, SizesRef block) {
  std::size_t dim = sizes.size();
  while (dim > 0 && block[dim - 1] == sizes[dim - 1]) {
    --dim;
  }
  return dim == 0 ? 0 : dim - 1;
}

/// Steps `index` through `block` in row-major order; false after the last.
bool advance(std::vector<std::int64_t>& index, SizesRef block) {
  for (std::size_t dim = index.size(); dim-- > 0;) {
    if (++index[dim] < block[dim]) {
      return true;
    }
    index[dim] = 0;
  }
  return false;
}

}  // namespace

/// The last comparison is written as a difference: offset + block could overflow.
std::int64_t product(SizesRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

void check_block(SizesRef sizes, SizesRef offset, SizesRef block) {
  TESSERA_CHECK(offset.size() == sizes.size() && block.size() == sizes.size(), "a block of ",
                block.size(), " dimensions was asked for of a tensor of ", sizes.size());
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    TESSERA_CHECK(offset[dim] >= 0 && block[dim] >= 0 && block[dim] <= sizes[dim] &&
                      offset[dim] <= sizes[dim] - block[dim],
                  "positions [", offset[dim], ", ", offset[dim], " + ", block[dim],
                  ") of dimension ", dim, " were asked for, which has ", sizes[dim]);
  }
}

/// A run spans all trailing dimensions that the block has whole, and the one before them; the index
/// steps through the dimensions in front of that.
void for_each_run(SizesRef sizes, SizesRef offset, SizesRef block,
                  const std::function<void(std::int64_t, std::int64_t)>& visit) {
  // The loop below visits at least once.
  if (std::find(block.begin(), block.end(), 0) != block.end()) {
    return;
  }
  const auto strides = row_major_strides(sizes);
  const auto outer = outer_dims(sizes, block);
  const auto count = product(block.subspan(outer));
  const auto first =
      std::inner_product(offset.begin(), offset.end(), strides.begin(), std::int64_t{0});
  std::vector<std::int64_t> index(outer, 0);
  // A block of a scalar has no outer dimensions: advance() of an empty index is false, one visit.
  do {
    visit(std::inner_product(index.begin(), index.end(), strides.begin(), first), count);
  } while (advance(index, block.first(outer)));
}

/// All dimensions before the first whose rows fit are stepped through one by one.
void for_each_piece(SizesRef sizes, std::int64_t most_elements,
                    const std::function<void(SizesRef, SizesRef)>& visit) {
  if (product(sizes) == 0) {
    return;
  }
  if (sizes.empty()) {
    return visit({}, {});
  }
  std::size_t cut = 0;
  std::vector<std::int64_t> offset(sizes.size(), 0);
  std::vector<std::int64_t> piece(sizes.begin(), sizes.end());
  while (cut + 1 < sizes.size() && product(sizes.subspan(cut + 1)) > most_elements) {
    piece[cut++] = 1;
  }
  const std::int64_t step =
      std::max<std::int64_t>(1, most_elements / product(sizes.subspan(cut + 1)));
  std::vector<std::int64_t> outer(cut, 0);
  do {
    std::ranges::copy(outer, offset.begin());
    for (offset[cut] = 0; offset[cut] < sizes[cut]; offset[cut] += step) {
      piece[cut] = std::min(step, sizes[cut] - offset[cut]);
      visit(offset, piece);
    }
  } while (advance(outer, sizes.first(cut)));
}

std::vector<std::int64_t> moved(SizesRef from, SizesRef by) {
  std::vector<std::int64_t> place(from.begin(), from.end());
  std::ranges::transform(place, by, place.begin(), std::plus<>());
  return place;
}

/// As a rule one box; owned_boxes() says which layouts cut a rank's part into several.
std::vector<Box> owned_blocks(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const std::vector<std::int64_t> zeros(sizes.size(), 0);
  if (!tessera::is_distributed(tensor)) {
    // A plain tensor is whole on every rank.
    return {Box{zeros, zeros, sizes.vec()}};
  }
  const auto& spec = sharding_spec(tensor);
  if (!spec.mesh.contains_this_rank()) {
    return {};
  }
  return owned_boxes(*spec.layout, std::span(sizes.data(), sizes.size()), spec.mesh.coordinate());
}

at::Tensor block_at(const at::Tensor& tensor, SizesRef offset, SizesRef sizes) {
  at::Tensor block = tensor;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    block = block.narrow(static_cast<std::int64_t>(dim), offset[dim], sizes[dim]);
  }
  return block;
}

/// In local coordinates: box.global_offset is the same place in the file.
at::Tensor local_block(const at::Tensor& local, const Box& box) {
  return block_at(local, box.local_offset, box.sizes);
}

}  // namespace tessera::checkpoint
