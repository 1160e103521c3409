// The threads of a launch, and teams of threads that each process a row. For .cu files only.
#pragma once

#include "device/vectors.h"

namespace tessera::kernels {

constexpr int kThreads = 256;  // number of threads in a block

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
