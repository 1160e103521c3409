// The 2-norm of many tensors on a GPU.
#include "device/launch_sizes.h"
#include "device/launches.h"

namespace tessera::kernels {
namespace {

constexpr int kWarp = 32;

/// A block.
class Block {
 public:
  __device__ static std::int64_t first() { return threadIdx.x; }
  __device__ static std::int64_t width() { return kThreads; }

  /// The sum of all threads' numbers, with the same bits in each.
  __device__ static double sum(double x) {
    __shared__ double of_warps[kThreads / kWarp];
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      x += __shfl_xor_sync(~0U, x, lanes);
    }
    __syncthreads();  // an earlier sum has been read
    of_warps[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = 0;
    for (const double of_warp : of_warps) {
      x += of_warp;
    }
    return x;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    square_sums_kernel(const __grid_constant__ SquareSums call) {
  const auto number = static_cast<std::int32_t>(blockIdx.x);
  const double sum = Block::sum(squares_of_chunk<T>(call, number, Block::first(), Block::width()));
  if (threadIdx.x == 0) {
    call.sums[number] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) sum_kinds_kernel(SumKinds call) {
  Block block;
  sum_kinds(call, block);
}

__global__ void clip_norm_kernel(ClipNorm call) {
  clip_norm(call);
}

}  // namespace

void launch(const SquareSums& call, Element type, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    square_sums_kernel<T><<<static_cast<unsigned>(call.list.chunks), kThreads, 0, stream>>>(call);
  });
}

void launch(const SumKinds& call, cudaStream_t stream) {
  sum_kinds_kernel<<<1, kThreads, 0, stream>>>(call);
}

void launch(const ClipNorm& call, cudaStream_t stream) {
  clip_norm_kernel<<<1, 1, 0, stream>>>(call);
}

}  // namespace tessera::kernels
