// Quantises rows to fp8 on a GPU. There is one block for each row, or, if the rows are columns in
// memory, one block for each tile.
#include <algorithm>

#include "device/launch_sizes.h"
#include "device/launches.h"
#include "device/team.h"

namespace tessera::kernels {
namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) quantize_fp8_kernel(QuantizeFp8 call) {
  Team<kThreads> block;
  for (std::int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    quantize_fp8_row<T, N>(call, row, block);
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) turn_to_fp8_kernel(QuantizeFp8 call) {
  __shared__ Fp8Tile tile;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * Fp8Tile::kSize;
  for (std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * Fp8Tile::kSize;
       column < call.columns; column += static_cast<std::int64_t>(gridDim.y) * Fp8Tile::kSize) {
    read_tile<T, N>(call, row, column, threadIdx.x, kThreads, tile);
    __syncthreads();
    store_tile(call, row, column, threadIdx.x, kThreads, tile);
    __syncthreads();
  }
}

}  // namespace

void launch(const QuantizeFp8& call, Element type, cudaStream_t stream) {
  const bool aligned = is_aligned(call.x, /*rows=*/2, call.stride, type) &&
                       is_aligned(call.factors, 1, 0, Element::kFloat);
  with_vectors(type, aligned, [&]<class T, int N>() {
    if (!call.turns) {
      const auto grid = static_cast<unsigned>(std::min<std::int64_t>(call.rows, 1 << 30));
      return quantize_fp8_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
    }
    const auto down = static_cast<unsigned>(divide_up(call.rows, Fp8Tile::kSize));
    const std::int64_t across = divide_up(call.columns, Fp8Tile::kSize);
    const dim3 grid(down, static_cast<unsigned>(std::min<std::int64_t>(across, 65535)));
    turn_to_fp8_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

}  // namespace tessera::kernels
