// Random numbers element by element. random.cu compiles the functions for GPUs, and random.cpp for
// CPUs.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/philox.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// Calls body.operator()<T>() with the C++ type of a floating-point scalar type. Throws Error for
/// other types. `what`: the operation's name in the error message.
template <class Body>
decltype(auto) with_float_type(c10::ScalarType type, const char* what, Body&& body) {
  switch (type) {
    case c10::ScalarType::Float:
      return body.template operator()<float>();
    case c10::ScalarType::Double:
      return body.template operator()<double>();
    case c10::ScalarType::BFloat16:
      return body.template operator()<c10::BFloat16>();
    case c10::ScalarType::Half:
      return body.template operator()<c10::Half>();
    default:
      fail(what, " of a ", type, " tensor is not supported; pass fp32, fp64, bf16 or fp16");
  }
}

/// Converts `value` to T with a single rounding to nearest even. For narrow types, round_to_odd()
/// to float comes first, which gives the same bits as a single rounding (Boldo and Melquiond 2008).
template <class T>
TESSERA_HOST_DEVICE inline T narrow(double value) {
  return static_cast<T>(value);
}

/// Returns `value` as a float if the float is exact, else the neighbouring float with last bit 1.
TESSERA_HOST_DEVICE inline float round_to_odd(double value) {
  auto rounded = static_cast<float>(value);
  const auto back = static_cast<double>(rounded);
  if (back == value || back != back) {
    return rounded;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, &rounded, sizeof bits);
  const bool away = value < 0.0 ? back < value : back > value;
  bits = (away ? bits - 1 : bits) | 1U;
  std::memcpy(&rounded, &bits, sizeof bits);
  return rounded;
}

template <>
TESSERA_HOST_DEVICE inline c10::BFloat16 narrow<c10::BFloat16>(double value) {
  return static_cast<c10::BFloat16>(round_to_odd(value));
}

template <>
TESSERA_HOST_DEVICE inline c10::Half narrow<c10::Half>(double value) {
  return static_cast<c10::Half>(round_to_odd(value));
}

/// Maximum number of dimensions of a BoxView. A BoxView has arrays of a fixed size, because it is
/// passed to kernels by value.
constexpr int kMaxDims = 8;

/// A rectangular region of a tensor: sizes, and strides in the local and in the global tensor.
struct BoxView {
  int dims = 0;
  std::int64_t numel = 1;
  std::int64_t local_start = 0;
  std::int64_t global_start = 0;
  std::int64_t sizes[kMaxDims];
  std::int64_t local_strides[kMaxDims];
  std::int64_t global_strides[kMaxDims];
};

inline BoxView box_view(const Box& box, const GlobalPlace& place, const at::Tensor& local) {
  TESSERA_CHECK(box.sizes.size() <= kMaxDims, "random numbers for a tensor of ", box.sizes.size(),
                " dimensions are not supported; use at most ", kMaxDims, " dimensions");
  BoxView view;
  view.dims = static_cast<int>(box.sizes.size());
  view.global_start = place.first_element;
  std::int64_t global_stride = 1;
  for (int d = view.dims - 1; d >= 0; --d) {
    view.sizes[d] = box.sizes[d];
    view.local_strides[d] = local.stride(d);
    view.global_strides[d] = global_stride;
    view.local_start += box.local_offset[d] * local.stride(d);
    view.global_start += box.global_offset[d] * global_stride;
    view.numel *= box.sizes[d];
    global_stride *= place.sizes[d];
  }
  return view;
}

/// The offset of an element in local memory, and the index of the element in the global tensor. The
/// index selects the random number.
struct Position {
  std::int64_t local;
  std::uint64_t global;
};

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

template <class T, class Draw>
TESSERA_HOST_DEVICE void fill_elements(T* data, const BoxView& box, const Draw& draw, PhiloxKey key,
                                       std::int64_t first, std::int64_t step) {
  for (std::int64_t i = first; i < box.numel; i += step) {
    const Position at = position_of(box, i);
    data[at.local] = narrow<T>(draw(uniform_at(key.seed, key.stream, at.global)));
  }
}

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

/// The kernels of random.cu, which cuda_registration.cpp registers.
void fill_random_cuda(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key);
void dropout_cuda(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key);

}  // namespace tessera::kernels
TESSERA_API_FOR_TEST_END
