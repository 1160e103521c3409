// Rows of an embedding table on a GPU, the table's gradient, and a check of indices.
#include "device/embedding.h"

#include <algorithm>

#include "device/launch_sizes.h"
#include "device/launches.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kMostBlocks = 1 << 30;

template <class T, int N>
__global__ void __launch_bounds__(kThreads) embedding_kernel(Embedding call) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
       i < call.count; i += step) {
    // An index of another rank's row is valid. An index that no rank has would give zeros on all
    // ranks, so it is refused.
    CUDA_KERNEL_ASSERT(call.indices[i] >= 0 && call.indices[i] < call.total_rows);
    embedding_row<T, N>(call, i, threadIdx.x, blockDim.x);
  }
}

/// The grid's first dimension has a block for each tile.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) embedding_backward_kernel(EmbeddingBackward call) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (vector * N < call.size) {
    embedding_backward_tile<T, N>(call, blockIdx.x, vector * N);
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) embedding_backward_rows_kernel(EmbeddingBackward call) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (vector * N < call.size) {
    embedding_backward_row<T, N>(call, blockIdx.x, vector * N);
  }
}

__global__ void __launch_bounds__(kThreads) check_indices_kernel(CheckIndices call) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < call.count) {
    CUDA_KERNEL_ASSERT(call.is_right(i));
  }
}

bool rows_are_aligned(const void* data, std::int64_t size, Element type) {
  return is_aligned(data, /*rows=*/2, size, type);
}

}  // namespace

void launch(const Embedding& call, Element type, cudaStream_t stream) {
  const bool aligned =
      rows_are_aligned(call.table, call.size, type) && rows_are_aligned(call.out, call.size, type);
  with_vectors(type, aligned, [&]<class T, int N>() {
    unsigned of_row = 1;
    while (of_row < kThreads && of_row < divide_up(call.size, N)) {
      of_row *= 2;
    }
    const dim3 block(of_row, kThreads / of_row);
    const std::int64_t blocks = std::min(divide_up(call.count, block.y), kMostBlocks);
    embedding_kernel<T, N><<<static_cast<unsigned>(blocks), block, 0, stream>>>(call);
  });
}

void launch(const EmbeddingBackward& call, Element type, cudaStream_t stream) {
  const bool aligned = rows_are_aligned(call.grad, call.size, type) &&
                       rows_are_aligned(call.weight_grad, call.size, type);
  with_vectors(type, aligned, [&]<class T, int N>() {
    const dim3 grid(static_cast<unsigned>(embedding_tiles(call.count)),
                    static_cast<unsigned>(divide_up(call.size, kThreads * N)));
    embedding_backward_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
    embedding_backward_rows_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

void launch(const CheckIndices& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up(call.count, kThreads));
  check_indices_kernel<<<blocks, kThreads, 0, stream>>>(call);
}

}  // namespace tessera::kernels
