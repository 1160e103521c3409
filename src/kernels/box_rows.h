// Iteration over tensors as rows of boxes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "device/pack.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"

namespace tessera::kernels {

// Iteration over local tensors on the host. random.cu iterates element by element instead, as GPU
// threads do.

/// The rows of a box, that is, its lines of elements along the last dimension. A range of the box's
/// elements, numbered in row-major order, is a list of whole and partial rows (runs), so threads
/// can divide a box evenly.
class BoxRows {
 public:
  // The object refers to its arguments, which must outlive it. A box without dimensions is one
  // element.
  BoxRows(const Box& box, c10::IntArrayRef global_sizes, c10::IntArrayRef local_strides)
      : box_(box), strides_(local_strides), global_strides_(box.sizes.size(), 1) {
    for (std::size_t d = box.sizes.size(); d-- > 1;) {
      global_strides_[d - 1] = global_strides_[d] * global_sizes[d];
    }
    columns_ = box.sizes.empty() ? 1 : box.sizes.back();
    for (const std::int64_t size : box.sizes) {
      numel_ *= size;
    }
  }

  std::int64_t numel() const { return numel_; }

  /// Calls run(local offset, global index, length) for the runs of the elements [begin, end). A run
  /// ends at the end of its row, because the next row begins elsewhere in memory and in the global
  /// tensor.
  template <class Run>
  void for_range(std::int64_t begin, std::int64_t end, Run&& run) const {
    while (begin < end) {
      const std::int64_t column = begin % columns_;
      const std::int64_t length = std::min(end - begin, columns_ - column);
      const auto [local, global] = locate(begin);
      run(local, global, length);
      begin += length;
    }
  }

 private:
  struct Position {
    std::int64_t local;
    std::int64_t global;
  };

  // The position of an element of the box. Divides for each dimension, so it is called once per run
  // and not once per element.
  Position locate(std::int64_t element) const {
    Position position{0, 0};
    for (std::size_t d = box_.sizes.size(); d-- > 0;) {
      const std::int64_t i = element % box_.sizes[d];
      element /= box_.sizes[d];
      position.local += (box_.local_offset[d] + i) * strides_[d];
      position.global += (box_.global_offset[d] + i) * global_strides_[d];
    }
    return position;
  }

  const Box& box_;
  c10::IntArrayRef strides_;
  std::vector<std::int64_t> global_strides_;
  // Strides for counting the elements of the box itself, not of the tensor.
  std::int64_t columns_ = 1;
  std::int64_t numel_ = 1;
};

/// A dimension in a joint iteration over two tensors: its size, and its stride in each tensor.
struct Extent {
  std::int64_t size, from_stride, to_stride;
};

/// Adds a dimension in front of the existing ones. Must be called for the last dimension of the
/// tensors first. A dimension is merged with its neighbour if they are contiguous in both tensors.
inline void add_extent(std::vector<Extent>& extents, const Extent& next) {
  if (next.size == 1) {
    return;
  }
  if (!extents.empty() && next.from_stride == extents.back().from_stride * extents.back().size &&
      next.to_stride == extents.back().to_stride * extents.back().size) {
    extents.back().size *= next.size;
  } else {
    extents.push_back(next);
  }
}

}  // namespace tessera::kernels

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// Describes a copy between tensors of equal sizes as a copy of rows; nullopt if one of the tensors
/// does not consist of equally spaced rows.
std::optional<PackPiece> pack_piece(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera::kernels
TESSERA_API_FOR_TEST_END
