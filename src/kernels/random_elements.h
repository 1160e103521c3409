// Random numbers element by element, as the threads of a GPU take them. random.cu compiles them for
// GPUs; tests without one compile them for the host.
#pragma once

#include <cstdint>

#include "narrow.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/distribution.h"
#include "tessera/kernels/detail/philox.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// Boxes are passed to kernels by value, so that their arrays have a fixed size.
constexpr int kMaxDims = 8;

/// A box as its elements are walked: sizes, and strides in the local and in the global tensor.
/// Plain arrays: it is passed to kernels by value.
struct BoxView {
  int dims = 0;
  std::int64_t numel = 1;
  std::int64_t local_start = 0;
  std::int64_t global_start = 0;
  std::int64_t sizes[kMaxDims];
  std::int64_t local_strides[kMaxDims];
  std::int64_t global_strides[kMaxDims];
};

/// Where an element is in local memory, and which random number is its own.
struct Position {
  std::int64_t local;
  std::uint64_t global;
};

/// Divides for each dimension and element; the transforms cost more.
TESSERA_HOST_DEVICE inline Position position_of(const BoxView& box, std::int64_t element) {
  std::int64_t local = box.local_start;
  std::int64_t global = box.global_start;
  for (int d = box.dims - 1; d >= 0; --d) {
    const std::int64_t i = element % box.sizes[d];
    element /= box.sizes[d];
    local += i * box.local_strides[d];
    global += i * box.global_strides[d];
  }
  return {local, static_cast<std::uint64_t>(global)};
}

/// Fills the box's elements `first`, `first` + `step` and so on.
template <class T, class Draw>
TESSERA_HOST_DEVICE void fill_elements(T* data, const BoxView& box, const Draw& draw, PhiloxKey key,
                                       std::int64_t first, std::int64_t step) {
  for (std::int64_t i = first; i < box.numel; i += step) {
    const Position at = position_of(box, i);
    data[at.local] = narrow<T>(draw(uniform_at(key.seed, key.stream, at.global)));
  }
}

/// Dropout of the box's elements `first`, `first` + `step` and so on.
template <class T, class Compute>
TESSERA_HOST_DEVICE void drop_elements(T* out, const T* x, const BoxView& box, double p,
                                       Compute scale, PhiloxKey key, std::int64_t first,
                                       std::int64_t step) {
  for (std::int64_t i = first; i < box.numel; i += step) {
    const Position at = position_of(box, i);
    const bool drop = uniform_at(key.seed, key.stream, at.global) < p;
    out[at.local] = drop ? T(0) : static_cast<T>(static_cast<Compute>(x[at.local]) * scale);
  }
}

}  // namespace tessera::kernels
TESSERA_API_FOR_TEST_END
