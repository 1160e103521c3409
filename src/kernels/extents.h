// Describes two tensors of equal sizes as equally spaced rows, for loops over both tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "device/lists.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// A dimension that two tensors share: its size, and its stride in each of the two tensors.
struct Extent {
  std::int64_t size, from_stride, to_stride;
};

/// Adds a dimension before the dimensions in `extents`. Begin with the tensors' last dimension.
/// Merges neighbouring dimensions if both tensors are contiguous there.
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

/// Describes a copy between tensors of equal sizes as a copy of rows. Returns nullopt if one of the
/// tensors does not consist of equally spaced rows.
std::optional<PackPiece> pack_piece(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera::kernels
TESSERA_API_FOR_TEST_END
