// Rotary position embedding of the heads of a position, forward and transposed: of queries and keys
// at once, and with them of values that lie in the same product.
#pragma once

#include "device/vectors.h"

namespace tessera::kernels {

/// Steps from one to the next, in elements.
struct HeadStrides {
  std::int64_t batch = 0;
  std::int64_t position = 0;
  std::int64_t group = 0;
  std::int64_t head = 0;
};

/// Heads of every position: `groups` of `heads` each, of 2 * half consecutive elements.
struct RotaryHeads {
  const void* x = nullptr;
  void* out = nullptr;
  HeadStrides from = {};
  HeadStrides to = {};
  std::int64_t groups = 1;
  std::int64_t heads = 0;
  bool turned = true;  ///< false: copied
};

constexpr int kMostRotaryParts = 3;

/// Queries, keys, and values, or the first of them, of positions (batch, sequence). The tables are
/// dense and fp32: (sequence, 2 * half).
struct Rotary {
  RotaryHeads parts[kMostRotaryParts] = {};  ///< without heads: none
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
  std::int64_t half = 0;
  const float* cos = nullptr;
  const float* sin = nullptr;
  bool transposed = false;
};

/// All heads of a position.
TESSERA_HOST_DEVICE inline std::int64_t heads_of_position(const Rotary& p) {
  std::int64_t heads = 0;
  for (const RotaryHeads& part : p.parts) {
    heads += part.groups * part.heads;
  }
  return heads;
}

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

/// The same of a head that is copied. A type's elements are exact in fp32.
template <class T, int N>
TESSERA_HOST_DEVICE void copy_halves(const Rotary& p, const T* x, T* out, std::int64_t i) {
  const std::int64_t n = p.half - i;
  store(out + i, load<N>(x + i, n), n);
  store(out + p.half + i, load<N>(x + p.half + i, n), n);
}

/// Where head `head` of a part begins.
TESSERA_HOST_DEVICE inline std::int64_t offset_of(const HeadStrides& strides, std::int64_t sample,
                                                  std::int64_t place, int head, int of_group) {
  const int group = head / of_group;
  return sample * strides.batch + place * strides.position + group * strides.group +
         (head - group * of_group) * strides.head;
}

/// One position of one sample, of batch * sequence: pairs of vectors `first`, `first` + `step` and
/// so on of its heads.
template <class T, int N>
TESSERA_HOST_DEVICE void rotate_position(const Rotary& p, std::int64_t position, int first,
                                         int step) {
  const std::int64_t sample = position / p.sequence;
  const std::int64_t place = position - sample * p.sequence;
  const float* cos = p.cos + place * 2 * p.half;
  const float* sin = p.sin + place * 2 * p.half;
  // Divided as 32 bits: a position has fewer elements.
  const auto vectors = static_cast<int>((p.half + N - 1) / N);
  const int count = vectors * static_cast<int>(heads_of_position(p));
  for (int item = first; item < count; item += step) {
    int head = item / vectors;
    const std::int64_t i = static_cast<std::int64_t>(item - head * vectors) * N;
    const RotaryHeads* part = p.parts;
    for (; head >= part->groups * part->heads; ++part) {
      head -= static_cast<int>(part->groups * part->heads);
    }
    const auto of_group = static_cast<int>(part->heads);
    const T* x =
        static_cast<const T*>(part->x) + offset_of(part->from, sample, place, head, of_group);
    T* out = static_cast<T*>(part->out) + offset_of(part->to, sample, place, head, of_group);
    if (part->turned) {
      rotate<T, N>(p, x, cos, sin, out, i);
    } else {
      copy_halves<T, N>(p, x, out, i);
    }
  }
}

}  // namespace tessera::kernels
