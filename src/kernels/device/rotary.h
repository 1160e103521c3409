// Rotary position embedding of the heads of a position, forward and transposed.
#pragma once

#include "device/vectors.h"

namespace tessera::kernels {

/// x: (batch, sequence, heads, 2 * half), strides in elements, the last one 1; `out` is dense, and
/// the tables are dense and fp32: (sequence, 2 * half).
struct Rotary {
  const void* x = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t position_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
  std::int64_t heads = 0;
  std::int64_t half = 0;
  const float* cos = nullptr;
  const float* sin = nullptr;
  bool transposed = false;
  void* out = nullptr;
};

/// a * b + c * d, within 2 ulp also where the products cancel (Kahan).
TESSERA_HOST_DEVICE inline float sum_of_products(float a, float b, float c, float d) {
  const float product = c * d;
  const float lost = std::fma(c, d, -product);
  return std::fma(a, b, product) + lost;
}

/// N elements of one half: own * cos + sign * other * sin.
template <class T, int N>
TESSERA_HOST_DEVICE void rotate_half(const Floats<N>& own, const Floats<N>& other, const float* cos,
                                     const float* sin, float sign, T* out, std::int64_t n) {
  const Floats<N> c = load<N>(cos, n);
  const Floats<N> s = load<N>(sin, n);
  Floats<N> turned;
  for (int k = 0; k < N; ++k) {
    turned.at[k] = sum_of_products(own.at[k], c.at[k], other.at[k], sign * s.at[k]);
  }
  store(out, turned, n);
}

/// N elements from `i` of each half of a head. One half is written before the tables of the other
/// are read, which takes fewer registers.
template <class T, int N>
TESSERA_HOST_DEVICE void rotate(const Rotary& p, const T* x, const float* cos, const float* sin,
                                T* out, std::int64_t i) {
  const std::int64_t n = p.half - i;
  const Floats<N> x1 = load<N>(x + i, n);
  const Floats<N> x2 = load<N>(x + p.half + i, n);
  // The transposed one takes the sine of where an element comes from.
  const std::int64_t sin1 = p.transposed ? p.half + i : i;
  const std::int64_t sin2 = p.transposed ? i : p.half + i;
  const float sign = p.transposed ? 1.0F : -1.0F;
  rotate_half(x1, x2, cos + i, sin + sin1, sign, out + i, n);
  rotate_half(x2, x1, cos + p.half + i, sin + sin2, -sign, out + p.half + i, n);
}

/// One position of one sample, of batch * sequence: pairs of vectors `first`, `first` + `step` and
/// so on of its heads.
template <class T, int N>
TESSERA_HOST_DEVICE void rotate_position(const Rotary& p, std::int64_t position, int first,
                                         int step) {
  const std::int64_t place = position % p.sequence;
  const T* x = static_cast<const T*>(p.x) + position / p.sequence * p.batch_stride +
               place * p.position_stride;
  T* out = static_cast<T*>(p.out) + position * p.heads * 2 * p.half;
  const float* cos = p.cos + place * 2 * p.half;
  const float* sin = p.sin + place * 2 * p.half;
  // Divided as 32 bits: a position has fewer elements.
  const auto vectors = static_cast<int>((p.half + N - 1) / N);
  const int count = vectors * static_cast<int>(p.heads);
  for (int item = first; item < count; item += step) {
    const int head = item / vectors;
    rotate<T, N>(p, x + head * p.head_stride, cos, sin, out + head * 2 * p.half,
                 static_cast<std::int64_t>(item - head * vectors) * N);
  }
}

}  // namespace tessera::kernels
