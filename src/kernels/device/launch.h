// Helpers for launches: select a kernel by a call's types and addresses, and teams of threads that
// each process a row. For .cu files only.
#pragma once

#include "device/vectors.h"

namespace tessera::kernels {

constexpr int kThreads = 256;  // number of threads in a block

/// Calls body.operator()<T>() with T for the element type `type`.
template <class Body>
void with_type(Element type, Body&& body) {
  switch (type) {
    case Element::kFloat:
      return body.template operator()<float>();
    case Element::kBFloat16:
      return body.template operator()<c10::BFloat16>();
    case Element::kHalf:
      return body.template operator()<c10::Half>();
  }
}

/// Calls body.operator()<T, N>() with the element type and the number of elements per access: 16
/// bytes, or one element if addresses are not aligned.
template <class Body>
void with_vectors(Element type, bool aligned, Body&& body) {
  with_type(type, [&]<class T>() {
    if (aligned) {
      body.template operator()<T, kVectorBytes / sizeof(T)>();
    } else {
      body.template operator()<T, 1>();
    }
  });
}

inline std::int64_t bytes_of(Element type) {
  return type == Element::kFloat ? 4 : 2;
}

/// Whether each of the `rows` rows, which are `stride` elements apart, begins at a multiple of 16
/// bytes.
inline bool is_aligned(const void* data, std::int64_t rows, std::int64_t stride, Element type) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0 &&
         (rows <= 1 || stride * bytes_of(type) % kVectorBytes == 0);
}

constexpr int kWarp = 32;

/// A team of `kWidth` threads of a block: a warp, or all threads of the block.
template <int kWidth, int kThreads = kWidth>
class Team {
  static_assert(kWidth == kWarp || kWidth == kThreads);

 public:
  static constexpr int kOfBlock = kThreads / kWidth;

  __device__ static std::int64_t number() { return threadIdx.x / kWidth; }
  __device__ static std::int64_t first() { return threadIdx.x % kWidth; }
  __device__ static std::int64_t width() { return kWidth; }

  /// The sum of the numbers of all threads of the team, with the same bits in each thread.
  template <class T>
  __device__ T sum(T x) {
    return reduce(x, [](T a, T b) { return a + b; });
  }
  template <class T>
  __device__ T max(T x) {
    return reduce(x, [](T a, T b) { return a < b ? b : a; });
  }

 private:
  template <class T, class Combine>
  __device__ T reduce(T x, Combine combine) {
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      x = combine(x, __shfl_xor_sync(~0U, x, lanes));
    }
    if constexpr (kWidth > kWarp) {
      // Two buffers are used in turn, because threads may still read the previous result while this
      // one is written.
      __shared__ T of_warps[2][kWidth / kWarp];
      turn_ ^= 1;
      of_warps[turn_][threadIdx.x / kWarp] = x;
      __syncthreads();
      x = of_warps[turn_][0];
      for (int warp = 1; warp < kWidth / kWarp; ++warp) {
        x = combine(x, of_warps[turn_][warp]);
      }
    }
    return x;
  }

  int turn_ = 0;
};

}  // namespace tessera::kernels
