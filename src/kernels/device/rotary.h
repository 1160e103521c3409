// Rotary position embedding of queries and keys, and the transposed rotation for backward, for all
// heads of a position.
#pragma once

#include <algorithm>
#include <iterator>

#include "device/vectors.h"

namespace tessera::kernels {

/// Distances in elements between neighbouring batch entries, positions and heads.
struct HeadStrides {
  std::int64_t batch = 0;
  std::int64_t position = 0;
  std::int64_t head = 0;
};

/// The heads of queries (or keys) at all positions. A head has 2 * half consecutive elements.
struct RotaryHeads {
  const void* x = nullptr;
  void* out = nullptr;
  HeadStrides from = {};
  HeadStrides to = {};
  std::int64_t heads = 0;
};

constexpr int kMostRotaryParts = 2;

/// Arguments of rotary embedding for queries, keys or both, at positions (batch, sequence). `cos`,
/// `sin`: dense fp32 (sequence, 2 * half). The vector length N must divide `half`.
struct Rotary {
  RotaryHeads parts[kMostRotaryParts] = {};  ///< queries and keys; unused if `heads` is 0
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
  std::int64_t half = 0;
  const float* cos = nullptr;
  const float* sin = nullptr;
  bool transposed = false;
};

TESSERA_HOST_DEVICE inline std::int64_t heads_of_position(const Rotary& p) {
  std::int64_t heads = 0;
  for (const RotaryHeads& part : p.parts) {
    heads += part.heads;
  }
  return heads;
}

/// Returns a * b + c * d, within 2 ulp even if a * b and c * d cancel (Kahan's method).
TESSERA_HOST_DEVICE inline float sum_of_products(float a, float b, float c, float d) {
  const float product = c * d;
  const float lost = std::fma(c, d, -product);
  return std::fma(a, b, product) + lost;
}

/// N elements of the cos and sin tables at one position, for the first half of a head (1) and the
/// second half (2). sin1 and sin2 include the rotation's signs.
template <int N>
struct RotaryTables {
  Floats<N> cos1, sin1, cos2, sin2;
};

template <int N>
TESSERA_HOST_DEVICE Floats<N> signed_at(const float* row, std::int64_t i, float sign) {
  Floats<N> values = load<N>(row + i, N);
  for (int k = 0; k < N; ++k) {
    values.at[k] *= sign;
  }
  return values;
}

template <int N>
TESSERA_HOST_DEVICE RotaryTables<N> tables_at(const Rotary& p, std::int64_t place, std::int64_t i) {
  const float* cos = p.cos + place * 2 * p.half;
  const float* sin = p.sin + place * 2 * p.half;
  const float sign = p.transposed ? 1.0F : -1.0F;
  return {load<N>(cos + i, N), signed_at<N>(sin, p.transposed ? p.half + i : i, sign),
          load<N>(cos + p.half + i, N), signed_at<N>(sin, p.transposed ? i : p.half + i, -sign)};
}

template <int N>
TESSERA_HOST_DEVICE Floats<N> turned(const Floats<N>& own, const Floats<N>& cos,
                                     const Floats<N>& other, const Floats<N>& sin) {
  Floats<N> result;
  for (int k = 0; k < N; ++k) {
    result.at[k] = sum_of_products(own.at[k], cos.at[k], other.at[k], sin.at[k]);
  }
  return result;
}

/// The vectors and the heads of a position that one thread rotates: the vectors first_vector,
/// first_vector + vector_step, ..., and the heads first_head, first_head + head_step, ...
struct RotaryShare {
  int first_vector = 0;
  int vector_step = 1;
  int first_head = 0;
  int head_step = 1;
};

template <class T, int N>
TESSERA_HOST_DEVICE void rotate_heads(const Rotary& p, const RotaryHeads& part, std::int64_t sample,
                                      std::int64_t place, std::int64_t i,
                                      const RotaryTables<N>& tables, const RotaryShare& share) {
  const auto heads = static_cast<int>(part.heads);
  const T* const x =
      static_cast<const T*>(part.x) + sample * part.from.batch + place * part.from.position + i;
  T* const out = static_cast<T*>(part.out) + sample * part.to.batch + place * part.to.position + i;
  for (int head = share.first_head; head < heads; head += share.head_step) {
    const T* const from = x + head * part.from.head;
    T* const to = out + head * part.to.head;
    const Floats<N> x1 = load<N>(from, N);
    const Floats<N> x2 = load<N>(from + p.half, N);
    store(to, turned(x1, tables.cos1, x2, tables.sin1), N);
    store(to + p.half, turned(x2, tables.cos2, x1, tables.sin2), N);
  }
}

/// Rotates the heads at one of the batch * sequence positions. A thread loads elements of the cos
/// and sin tables once, and uses the elements for all heads.
template <class T, int N>
TESSERA_HOST_DEVICE void rotate_position(const Rotary& p, std::int64_t position,
                                         const RotaryShare& share) {
  const std::int64_t sample = position / p.sequence;
  const std::int64_t place = position - sample * p.sequence;
  for (std::int64_t i = share.first_vector * N; i < p.half; i += share.vector_step * N) {
    const RotaryTables<N> tables = tables_at<N>(p, place, i);
    for (const RotaryHeads& part : p.parts) {
      if (part.heads > 0) {
        rotate_heads<T>(p, part, sample, place, i, tables, share);
      }
    }
  }
}

/// Whether vectors of 16 bytes can access both halves of every head, and the cos and sin tables.
inline bool is_aligned(const Rotary& call, Element type) {
  const auto heads = [&](const void* data, const HeadStrides& s) {
    return is_aligned(data, /*rows=*/2, s.batch | s.position | s.head, type);
  };
  return call.half * bytes_of(type) % kVectorBytes == 0 && is_aligned(call.cos, 1, 0, type) &&
         is_aligned(call.sin, 1, 0, type) &&
         std::all_of(std::begin(call.parts), std::end(call.parts), [&](const RotaryHeads& part) {
           return part.heads == 0 || (heads(part.x, part.from) && heads(part.out, part.to));
         });
}

}  // namespace tessera::kernels
