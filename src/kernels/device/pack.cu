// Copies of many tensors on a GPU: one block for each chunk.
#include "device/launch_sizes.h"
#include "device/launches.h"

namespace tessera::kernels {
namespace {

template <class From, class To>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Pack call) {
  copy_chunk<From, To>(call, static_cast<std::int32_t>(blockIdx.x), threadIdx.x, kThreads);
}

}  // namespace

void launch(const Pack& call, Element from, cudaStream_t stream) {
  with_type(from, [&]<class From>() {
    with_type(call.to, [&]<class To>() {
      pack_kernel<From, To><<<static_cast<unsigned>(call.list.chunks), kThreads, 0, stream>>>(call);
    });
  });
}

}  // namespace tessera::kernels
