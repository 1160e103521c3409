#include "tessera/internals/detail/shape_geometry.h"

#include <c10/core/TensorImpl.h>

namespace tessera::detail {
namespace {

/// A tensor without memory, of any type.
class ShapeOnly final : public c10::TensorImpl {
 public:
  ShapeOnly(c10::IntArrayRef sizes, c10::IntArrayRef strides)
      : TensorImpl(c10::DispatchKeySet(), c10::scalarTypeToTypeMeta(c10::ScalarType::Byte),
                   c10::Device(c10::kMeta)) {
    set_sizes_and_strides(sizes, strides);
  }
  ShapeGeometry geometry() const {
    return {.numel = numel_,
            .contiguous = is_contiguous_,
            .channels_last = is_channels_last_,
            .channels_last_contiguous = is_channels_last_contiguous_,
            .channels_last_3d = is_channels_last_3d_,
            .channels_last_3d_contiguous = is_channels_last_3d_contiguous_,
            .non_overlapping_and_dense = is_non_overlapping_and_dense_};
  }
};

}  // namespace

ShapeGeometry shape_geometry(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return ShapeOnly(sizes, strides).geometry();
}

}  // namespace tessera::detail
