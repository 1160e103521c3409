// Quantises the rows of a matrix to float8_e4m3fn, with a scale for each row.
#pragma once

#include <c10/util/Float8_e4m3fn.h>
#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

#include <bit>

#include "device/vectors.h"

namespace tessera::kernels {

/// Arguments to quantise x to fp8. Rows of x are contiguous, and begin every `stride` elements.
struct QuantizeFp8 {
  const void* x = nullptr;
  const float* factors = nullptr;  ///< (columns): factors of the columns of x, or nullptr
  std::int64_t stride = 0, rows = 0, columns = 0;
  std::uint8_t* values = nullptr;  ///< (rows, columns), dense: the fp8 values of x
  float* scales = nullptr;         ///< (rows): the scale of each row of x
};

/// The scale of a row, and the inverse scale, which is NaN if the row has a NaN or infinite
/// element.
struct Fp8Scale {
  float scale, inverse;
};

/// Computes a row's scale from the bits of the row's maximum. The largest fp8 value is 448 = 1.75 *
/// 2^8, so a fraction above 0.75 must increase the exponent.
TESSERA_HOST_DEVICE inline Fp8Scale fp8_scale(std::uint32_t maximum) {
  constexpr std::uint32_t kInfinity = 0x7F800000U, kNaN = 0x7FC00000U, kLeast = 127 - 100;
  const bool finite = maximum < kInfinity;
  const std::uint32_t rounded = ((finite ? maximum : kInfinity) + 0x1FFFFFU) >> 23U;
  const std::uint32_t exponent = rounded < kLeast + 8 ? kLeast : rounded - 8;
  return {std::bit_cast<float>(exponent << 23U),
          std::bit_cast<float>(finite ? (254U - exponent) << 23U : kNaN)};
}

/// Returns the fp8 bits of x in the low byte, and of y in the next byte. GPUs of compute capability
/// 8.9 have an equivalent instruction.
TESSERA_HOST_DEVICE inline std::uint32_t fp8_codes(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
#else
  return c10::Float8_e4m3fn(x).x | static_cast<std::uint32_t>(c10::Float8_e4m3fn(y).x) << 8U;
#endif
}

/// Multiplies N elements by `factor` and stores the first n products as fp8 numbers. Makes a single
/// memory access if the address is aligned and n >= N.
template <int N>
TESSERA_HOST_DEVICE void store_fp8(std::uint8_t* to, const Floats<N>& v, float factor,
                                   std::int64_t n) {
  Words<std::max(N, 4)> codes{};
  for (int k = 0; k < N; k += 2) {
    const float next = k + 1 < N ? v.at[k + 1] * factor : 0.0F;
    codes.words[k / 4] |= fp8_codes(v.at[k] * factor, next) << (k % 4 * 8);
  }
  if (N >= 4 && n >= N && reinterpret_cast<std::uintptr_t>(to) % N == 0) {
    return write_global(codes, reinterpret_cast<decltype(codes)*>(to));
  }
  for (int k = 0; k < N && k < n; ++k) {
    to[k] = static_cast<std::uint8_t>(codes.words[k / 4] >> (k % 4 * 8));
  }
}

/// Quantises a contiguous row to fp8, by one team of threads. The team reads the row twice, the
/// second time from the L1 cache.
template <class T, int N, class Team>
TESSERA_HOST_DEVICE void quantize_fp8_row(const QuantizeFp8& p, std::int64_t row, Team& team) {
  const auto elements = [&](std::int64_t i, std::int64_t n) {
    Floats<N> v = load<N>(static_cast<const T*>(p.x) + row * p.stride + i, n);
    if (p.factors != nullptr) {
      const Floats<N> factors = load<N>(p.factors + i, n);
      for (int k = 0; k < N; ++k) {
        v.at[k] *= factors.at[k];
      }
    }
    return v;
  };
  std::uint32_t maximum = 0;
  for_vectors<N, 1>(p.columns, team, elements, [&](auto, auto, const Floats<N>& v) {
    for (int k = 0; k < N; ++k) {
      // Returns the bits of |x|, which are ordered like |x|; the bits of NaN are above all others.
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(v.at[k]) & 0x7FFFFFFFU;
      maximum = bits > maximum ? bits : maximum;
    }
  });
  const Fp8Scale scale = fp8_scale(team.max(maximum));
  if (team.first() == 0) {
    p.scales[row] = scale.scale;
  }
  for_vectors<N, 1>(p.columns, team, elements,
                    [&](std::int64_t i, std::int64_t n, const Floats<N>& v) {
                      store_fp8(p.values + row * p.columns + i, v, scale.inverse, n);
                    });
}

inline bool is_aligned(const QuantizeFp8& call, Element type) {
  return is_aligned(call.x, /*rows=*/2, call.stride, type) &&
         is_aligned(call.factors, 1, 0, Element::kFloat);
}

}  // namespace tessera::kernels
