// AdamW on a GPU: one thread block for each chunk of a parameter. Compiled with --fmad=false, so
// that results have the same bits as on a CPU.
#include "device/launches.h"

namespace tessera::kernels {
namespace {

template <class M>
__global__ void __launch_bounds__(kThreads, 3) adamw_kernel(const __grid_constant__ AdamW call) {
  __shared__ AdamWFactors factors;
  const Chunk chunk = chunk_of(call.list, static_cast<std::int32_t>(blockIdx.x));
  const AdamWPiece& piece = call.list.pieces[chunk.piece];
  if (threadIdx.x == 0) {
    factors = factors_of(call, piece);
  }
  __syncthreads();
  adamw_chunk<M>(piece, factors, chunk, threadIdx.x, kThreads);
}

}  // namespace

void launch(const AdamW& call, Element moments, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(call.list.chunks);
  if (moments == Element::kFloat) {
    adamw_kernel<float><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    adamw_kernel<c10::BFloat16><<<blocks, kThreads, 0, stream>>>(call);
  }
}

}  // namespace tessera::kernels
