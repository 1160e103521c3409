// Quantises the rows of a matrix to float8_e4m3fn, with a scale for each row. The rows may be the
// columns of another matrix: then one kernel finds their maxima, and a second one transposes tiles.
#pragma once

#include <c10/util/Float8_e4m3fn.h>

#include "device/vectors.h"

namespace tessera::kernels {

/// Element (row, column) of x is at row * row_stride + column * column_stride; one of the strides
/// is 1.
struct QuantizeFp8 {
  const void* x = nullptr;
  const float* factors = nullptr;  ///< factors of x's columns: (columns); null for ones
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::uint8_t* values = nullptr;   ///< (rows, columns), dense
  float* scales = nullptr;          ///< (rows): the scale of each row
  std::uint32_t* maxima = nullptr;  ///< (rows), initially zeros; used if row_stride is 1
};

/// The bits of |x|, which are ordered like |x|; those of NaN are above all others.
TESSERA_HOST_DEVICE inline std::uint32_t magnitude_bits(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits & 0x7FFFFFFFU;
}

TESSERA_HOST_DEVICE inline float float_of_bits(std::uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

constexpr std::uint32_t kInfinityBits = 0x7F800000U;

/// The biased exponent of a row's scale. 448 is 1.75 * 2^8: adding 0x1FFFFF carries into the
/// exponent if the fraction is above 0.75.
TESSERA_HOST_DEVICE inline std::uint32_t scale_exponent(std::uint32_t maximum) {
  constexpr std::uint32_t kLeast = 127 - 100;
  const std::uint32_t number = maximum < kInfinityBits ? maximum : kInfinityBits;
  const std::uint32_t rounded = (number + 0x1FFFFFU) >> 23U;
  return rounded < kLeast + 8 ? kLeast : rounded - 8;
}

TESSERA_HOST_DEVICE inline float fp8_scale(std::uint32_t maximum) {
  return float_of_bits(scale_exponent(maximum) << 23U);
}

/// The inverse of a row's scale; NaN if the row has a non-finite element.
TESSERA_HOST_DEVICE inline float inverse_fp8_scale(std::uint32_t maximum) {
  return float_of_bits(maximum >= kInfinityBits ? 0x7FC00000U
                                                : (254U - scale_exponent(maximum)) << 23U);
}

TESSERA_HOST_DEVICE inline std::uint8_t fp8_code(float scaled) {
  return c10::Float8_e4m3fn(scaled).x;
}

/// Stores the first n of N codes. A whole vector is aligned to N bytes and stored with one access.
template <int N>
TESSERA_HOST_DEVICE void store_codes(std::uint8_t* to, const Floats<N>& scaled, std::int64_t n) {
  std::uint8_t codes[N];
  for (int i = 0; i < N; ++i) {
    codes[i] = fp8_code(scaled.at[i]);
  }
  if (N > 1 && n >= N) {
    std::memcpy(__builtin_assume_aligned(to, N), codes, N);
    return;
  }
  for (int i = 0; i < N && i < n; ++i) {
    to[i] = codes[i];
  }
}

/// N elements of a row from column i on, multiplied by the factors.
template <class T, int N>
TESSERA_HOST_DEVICE Floats<N> fp8_elements(const QuantizeFp8& p, const T* row, std::int64_t i) {
  Floats<N> v = load<N>(row + i, p.columns - i);
  if (p.factors != nullptr) {
    const Floats<N> factors = load<N>(p.factors + i, p.columns - i);
    for (int k = 0; k < N; ++k) {
      v.at[k] *= factors.at[k];
    }
  }
  return v;
}

/// Quantises a row of consecutive elements, by one team.
template <class T, int N, class Team>
TESSERA_HOST_DEVICE void quantize_fp8_row(const QuantizeFp8& p, std::int64_t row, Team& team) {
  const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
  std::uint32_t maximum = 0;
  for (std::int64_t i = team.first() * N; i < p.columns; i += team.width() * N) {
    const Floats<N> v = fp8_elements<T, N>(p, x, i);
    for (int k = 0; k < N; ++k) {
      const std::uint32_t bits = magnitude_bits(v.at[k]);
      maximum = bits > maximum ? bits : maximum;
    }
  }
  maximum = team.max(maximum);
  if (team.first() == 0) {
    p.scales[row] = fp8_scale(maximum);
  }
  const float inverse = inverse_fp8_scale(maximum);
  // The row is read a second time, from the nearest cache.
  for (std::int64_t i = team.first() * N; i < p.columns; i += team.width() * N) {
    Floats<N> v = fp8_elements<T, N>(p, x, i);
    for (int k = 0; k < N; ++k) {
      v.at[k] *= inverse;
    }
    store_codes<N>(p.values + row * p.columns + i, v, p.columns - i);
  }
}

template <class T>
TESSERA_HOST_DEVICE float fp8_element(const QuantizeFp8& p, std::int64_t row, std::int64_t column) {
  const auto x =
      static_cast<float>(static_cast<const T*>(p.x)[row * p.row_stride + column * p.column_stride]);
  return p.factors == nullptr ? x : x * p.factors[column];
}

/// The bits of a row's maximum over the columns `first`, `first` + `step` and so on.
template <class T>
TESSERA_HOST_DEVICE std::uint32_t largest_of_columns(const QuantizeFp8& p, std::int64_t row,
                                                     std::int64_t first, std::int64_t step) {
  std::uint32_t maximum = 0;
  for (std::int64_t column = first; column < p.columns; column += step) {
    const std::uint32_t bits = magnitude_bits(fp8_element<T>(p, row, column));
    maximum = bits > maximum ? bits : maximum;
  }
  return maximum;
}

/// The code of one element. maxima[row] must be complete.
template <class T>
TESSERA_HOST_DEVICE std::uint8_t fp8_code_at(const QuantizeFp8& p, std::int64_t row,
                                             std::int64_t column) {
  return fp8_code(fp8_element<T>(p, row, column) * inverse_fp8_scale(p.maxima[row]));
}

}  // namespace tessera::kernels
