// What sizes and strides imply: the fields that libtorch computes for every tensor. Computed once
// for many tensors, and copied into each (tensor_wrapper.h). A Tensor answers for most of them, one
// by one, each by a virtual call; "channels last, but not contiguous so" is in no public function.
//
// No version differs.
//
// Canary: ShapeGeometryCanary.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

struct ShapeGeometry {
  std::int64_t numel = 0;
  bool contiguous = false;
  bool channels_last = false;
  bool channels_last_contiguous = false;
  bool channels_last_3d = false;
  bool channels_last_3d_contiguous = false;
  bool non_overlapping_and_dense = false;
};

ShapeGeometry shape_geometry(c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace tessera::detail
TESSERA_API_END
