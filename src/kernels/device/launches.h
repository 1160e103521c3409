// Teams of threads, and functions that launch the kernels of this folder on a stream of the current
// device.
#pragma once

#include <cuda_runtime_api.h>

#include "device/adamw.h"
#include "device/cross_entropy.h"
#include "device/embedding.h"
#include "device/lists.h"
#include "device/quantize_fp8.h"
#include "device/rms_norm.h"
#include "device/rotary.h"
#include "device/silu_mul.h"

namespace tessera::kernels {

void launch(const CrossEntropy& call, Element type, cudaStream_t stream);
void launch(const CrossEntropyBackward& call, Element type, cudaStream_t stream);
void launch(const Scale& call, Element type, cudaStream_t stream);
void launch(const Embedding& call, Element type, cudaStream_t stream);
/// Launches the two kernels of the embedding gradient.
void launch(const EmbeddingBackward& call, Element type, cudaStream_t stream);
void launch(const CheckIndices& call, cudaStream_t stream);
void launch(const RmsNorm& call, Element type, cudaStream_t stream);
/// Launches the backward of RMSNorm, and a second kernel if the weight's gradient is needed.
void launch(const RmsNormBackward& call, Element type, cudaStream_t stream);
void launch(const Rotary& call, Element type, cudaStream_t stream);
void launch(const SiluMul& call, Element type, cudaStream_t stream);
void launch(const SiluMulBackward& call, Element type, cudaStream_t stream);
void launch(const Pack& call, Element from, cudaStream_t stream);
void launch(const AdamW& call, Element moments, cudaStream_t stream);
void launch(const SquareSums& call, Element type, cudaStream_t stream);
void launch(const SumKinds& call, cudaStream_t stream);
void launch(const ClipNorm& call, cudaStream_t stream);
void launch(const QuantizeFp8& call, Element type, cudaStream_t stream);

#ifdef __CUDACC__

constexpr int kThreads = 256;  // number of threads of a block

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

  /// Returns the sum of x over the threads of the team, with the same bits in each thread.
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
      // Two buffers are used in turn: some threads can still read the previous result from one
      // buffer while other threads write the next result to the other buffer.
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

#endif

}  // namespace tessera::kernels
