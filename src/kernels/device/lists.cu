// Norms and copies of lists of tensors on a GPU: one thread block for each chunk of a tensor.
#include "device/launches.h"

namespace tessera::kernels {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    square_sums_kernel(const __grid_constant__ SquareSums call) {
  const auto number = static_cast<std::int32_t>(blockIdx.x);
  Team<kThreads> block;
  const double sum = block.sum(squares_of_chunk<T>(call, number, block.first(), block.width()));
  if (threadIdx.x == 0) {
    call.sums[number] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) sum_kinds_kernel(SumKinds call) {
  Team<kThreads> block;
  sum_kinds(call, block);
}

__global__ void clip_norm_kernel(ClipNorm call) {
  clip_norm(call);
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Pack call) {
  copy_chunk<From, To>(call, static_cast<std::int32_t>(blockIdx.x), threadIdx.x, kThreads);
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

void launch(const Pack& call, Element from, cudaStream_t stream) {
  with_type(from, [&]<class From>() {
    with_type(call.to, [&]<class To>() {
      pack_kernel<From, To><<<static_cast<unsigned>(call.list.chunks), kThreads, 0, stream>>>(call);
    });
  });
}

}  // namespace tessera::kernels
