// Cross entropy of rows of logits on a GPU: one block for each row.
#include <algorithm>

#include "device/cross_entropy.h"
#include "device/launch_sizes.h"
#include "device/launches.h"
#include "device/team.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kMostRows = 65535;  // maximum size of a grid's second dimension
constexpr int kVectorsOfThread = 4;        // number of vectors of a row that a thread writes

template <class T>
__global__ void __launch_bounds__(kCrossEntropyThreads) cross_entropy_kernel(CrossEntropy call) {
  Team<kCrossEntropyThreads> block;
  for (std::int64_t row = blockIdx.x; row < call.logits.rows; row += gridDim.x) {
    const RowSums sums = sums_of_row<T, kVectorBytes / sizeof(T)>(call.logits, row, block);
    if (threadIdx.x == 0) {
      write_sums<T>(call, row, sums);
    }
  }
}

__device__ std::int64_t thread_of_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads) cross_entropy_rows_kernel(CrossEntropy call) {
  if (thread_of_grid() < call.logits.rows) {
    finish_row(call, thread_of_grid());
  }
}

/// The threads of several blocks that process one row together.
struct BlocksOfRow {
  __device__ static std::int64_t first() { return thread_of_grid(); }
  __device__ static std::int64_t width() {
    return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(CrossEntropyBackward call) {
  for (std::int64_t row = blockIdx.y; row < call.logits.rows; row += gridDim.y) {
    cross_entropy_backward_row<T, N>(call, row, BlocksOfRow());
  }
}

template <class X, class T, int N>
__global__ void __launch_bounds__(kThreads) scale_kernel(Scale call) {
  scale_elements<X, T, N>(call, thread_of_grid(), BlocksOfRow::width());
}

unsigned blocks_for(std::int64_t items, std::int64_t of_block) {
  return static_cast<unsigned>(std::min<std::int64_t>(divide_up(items, of_block), 1 << 30));
}

}  // namespace

void launch(const CrossEntropy& call, Element type, cudaStream_t stream) {
  const std::int64_t rows = call.logits.rows;
  if (call.step == CrossEntropyStep::kRelative || call.step == CrossEntropyStep::kLosses) {
    cross_entropy_rows_kernel<<<blocks_for(rows, kThreads), kThreads, 0, stream>>>(call);
    return;
  }
  with_vectors(type, /*aligned=*/true, [&]<class T, int N>() {
    cross_entropy_kernel<T><<<blocks_for(rows, 1), kCrossEntropyThreads, 0, stream>>>(call);
  });
}

void launch(const CrossEntropyBackward& call, Element type, cudaStream_t stream) {
  const Logits& in = call.logits;
  // Vectors are possible only if the rows of logits and gradient have equal offsets from a multiple
  // of 16 bytes.
  const auto apart =
      reinterpret_cast<std::uintptr_t>(in.data) - reinterpret_cast<std::uintptr_t>(call.gradient);
  const bool alike = apart % kVectorBytes == 0 &&
                     (in.stride - call.gradient_stride) * bytes_of(type) % kVectorBytes == 0;
  with_vectors(type, alike, [&]<class T, int N>() {
    const std::int64_t of_block = kThreads * kVectorsOfThread * N;
    const dim3 grid(blocks_for(in.columns, of_block),
                    static_cast<unsigned>(std::min(in.rows, kMostRows)));
    cross_entropy_backward_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

void launch(const Scale& call, Element type, cudaStream_t stream) {
  const bool aligned = is_aligned(call.x, 1, 0, type) && is_aligned(call.out, 1, 0, type);
  with_vectors(type, aligned, [&]<class T, int N>() {
    const unsigned grid = blocks_for(call.size, kThreads * N);
    if (call.x_is_float) {
      scale_kernel<float, T, N><<<grid, kThreads, 0, stream>>>(call);
    } else {
      scale_kernel<T, T, N><<<grid, kThreads, 0, stream>>>(call);
    }
  });
}

}  // namespace tessera::kernels
