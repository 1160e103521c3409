// CUDA kernels for rows of matrices. The sources in this folder use no part of libtorch except its
// half-precision types, so nvcc compiles them within seconds.
#include <algorithm>

#include "device/launches.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kMostRows = 65535;  // CUDA's limit for a grid's second dimension

unsigned blocks_for(std::int64_t items, std::int64_t of_block) {
  return static_cast<unsigned>(std::min<std::int64_t>(divide_up(items, of_block), 1 << 30));
}

__device__ std::int64_t thread_of_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

struct BlocksOfRow {
  __device__ static std::int64_t first() { return thread_of_grid(); }
  __device__ static std::int64_t width() {
    return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  }
};

}  // namespace

// RMSNorm kernels: a warp processes a short row, a thread block a longer row.

namespace {

// Number of bytes of shared memory that every kernel may use.
constexpr std::int64_t kSharedBytes = 48 << 10;

template <class T, class W, int N, int kWidth>
__global__ void __launch_bounds__(kRmsNormThreads) rms_norm_kernel(RmsNorm call) {
  Team<kWidth, kRmsNormThreads> team;
  // Number of vectors that a thread loads at once; higher for a warp for each row, because each
  // thread then has more elements.
  constexpr int kAtOnce = kWidth == kWarp ? 4 : 2;
  constexpr std::int64_t kTeams = decltype(team)::kOfBlock;
  for (std::int64_t row = blockIdx.x * kTeams + team.number(); row < call.rows;
       row += gridDim.x * kTeams) {
    rms_norm_row<T, W, N, kAtOnce>(call, row, team);
  }
}

/// Each team sums the gradient of the RMSNorm weight over its rows. The sums are in shared memory,
/// or in `terms` if shared memory is too small.
template <class T, class W, int N, int kWidth>
__global__ void __launch_bounds__(kRmsNormBackwardThreads, 8)
    rms_norm_backward_kernel(RmsNormBackward call, bool in_shared) {
  extern __shared__ __align__(kVectorBytes) float shared[];
  Team<kWidth, kRmsNormBackwardThreads> team;
  constexpr std::int64_t kTeams = decltype(team)::kOfBlock;
  const std::int64_t size = call.forward.size;
  float* const terms = call.terms + blockIdx.x * size;
  float* sums = nullptr;
  if (call.weight_grad != nullptr) {
    sums = in_shared ? shared + team.number() * size : terms;
    for (std::int64_t i = team.first(); i < size; i += kWidth) {
      sums[i] = 0;
    }
    __syncthreads();
  }
  for (std::int64_t row = blockIdx.x * kTeams + team.number(); row < call.forward.rows;
       row += gridDim.x * kTeams) {
    rms_norm_backward_row<T, W, N>(call, row, sums, team);
  }
  if (sums == nullptr || !in_shared) {
    return;
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < size; i += kRmsNormBackwardThreads) {
    terms[i] = sum_of_terms(shared, kTeams, size, i, /*first=*/0, /*step=*/1);
  }
}

constexpr int kTermRows = 8;

template <class W>
__global__ void __launch_bounds__(kWarp* kTermRows)
    rms_norm_weight_kernel(W* weight_grad, const float* terms, std::int64_t rows,
                           std::int64_t size) {
  __shared__ float sums[kTermRows][kWarp];
  const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  sums[threadIdx.y][threadIdx.x] =
      element < size ? sum_of_terms(terms, rows, size, element, threadIdx.y, kTermRows) : 0.0F;
  __syncthreads();
  if (threadIdx.y == 0 && element < size) {
    weight_grad[element] =
        static_cast<W>(sum_of_terms(&sums[0][0], kTermRows, kWarp, threadIdx.x, 0, 1));
  }
}

/// Calls body.operator()<T, W, N, kWidth>(), where kWidth is the number of threads for each row: a
/// warp for up to `short_row` elements, otherwise a block of `kBlock`.
template <int kBlock, class Body>
void with_kernel(const RmsNorm& call, Element type, bool aligned, std::int64_t short_row,
                 Body&& body) {
  with_vectors(type, aligned, [&]<class T, int N>() {
    const auto of_weight = [&]<class W>() {
      if (N > 1 && call.size <= short_row) {
        body.template operator()<T, W, N, (N > 1 ? kWarp : kBlock)>();
      } else {
        body.template operator()<T, W, N, kBlock>();
      }
    };
    if (call.weight_is_float) {
      of_weight.template operator()<float>();
    } else {
      of_weight.template operator()<T>();
    }
  });
}

}  // namespace

void launch(const RmsNorm& call, Element type, cudaStream_t stream) {
  with_kernel<kRmsNormThreads>(
      call, type, is_aligned(call, type), kShortRow, [&]<class T, class W, int N, int kWidth>() {
        const unsigned grid = blocks_for(call.rows, kRmsNormThreads / kWidth);
        rms_norm_kernel<T, W, N, kWidth><<<grid, kRmsNormThreads, 0, stream>>>(call);
      });
}

void launch(const RmsNormBackward& call, Element type, cudaStream_t stream) {
  const RmsNorm& in = call.forward;
  const auto blocks = static_cast<unsigned>(rms_norm_blocks(in.rows, in.size));
  with_kernel<kRmsNormBackwardThreads>(
      in, type, is_aligned(call, type), kShortBackwardRow,
      [&]<class T, class W, int N, int kWidth>() {
        const std::int64_t bytes = kRmsNormBackwardThreads / kWidth * in.size * 4;
        const bool in_shared = call.weight_grad != nullptr && bytes <= kSharedBytes;
        rms_norm_backward_kernel<T, W, N, kWidth>
            <<<blocks, kRmsNormBackwardThreads, in_shared ? bytes : 0, stream>>>(call, in_shared);
        if (call.weight_grad != nullptr) {
          rms_norm_weight_kernel<W>
              <<<static_cast<unsigned>(divide_up(in.size, kWarp)), dim3(kWarp, kTermRows), 0,
                 stream>>>(static_cast<W*>(call.weight_grad), call.terms, blocks, in.size);
        }
      });
}

// The SwiGLU kernels: silu(gate) * up, and its gradients.

namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(SiluMul call) {
  for (std::int64_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
    silu_mul_row<T, N>(call, row, BlocksOfRow::first(), BlocksOfRow::width());
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) silu_mul_backward_kernel(SiluMulBackward call) {
  for (std::int64_t row = blockIdx.y; row < call.forward.rows; row += gridDim.y) {
    silu_mul_backward_row<T, N>(call, row, BlocksOfRow::first(), BlocksOfRow::width());
  }
}

/// Returns a launch grid with a thread for each vector of a row. Above kMostRows rows, a block
/// processes several rows.
dim3 grid_of_rows(std::int64_t rows, std::int64_t vectors) {
  return {blocks_for(vectors, kThreads), static_cast<unsigned>(std::min(rows, kMostRows))};
}

}  // namespace

void launch(const SiluMul& call, Element type, cudaStream_t stream) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    const dim3 grid = grid_of_rows(call.rows, divide_up(call.size, N));
    silu_mul_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

void launch(const SiluMulBackward& call, Element type, cudaStream_t stream) {
  const SiluMul& in = call.forward;
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    const dim3 grid = grid_of_rows(in.rows, divide_up(in.size, N));
    silu_mul_backward_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

// Rotary position embedding. A thread processes one vector in several heads of a position. If a
// position has few heads, a block processes several positions.

namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ Rotary call) {
  const std::int64_t positions = call.batch * call.sequence;
  const RotaryShare share{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                          static_cast<int>(threadIdx.y), static_cast<int>(blockDim.y)};
  for (std::int64_t position = static_cast<std::int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
       position < positions; position += static_cast<std::int64_t>(gridDim.x) * blockDim.z) {
    rotate_position<T, N>(call, position, share);
  }
}

std::int64_t most_heads(const Rotary& call) {
  std::int64_t heads = 1;
  for (const RotaryHeads& part : call.parts) {
    heads = std::max(heads, part.heads);
  }
  return heads;
}

/// Maximum number of heads that a thread rotates with the cos and sin elements in its registers.
constexpr std::int64_t kHeadsOfThread = 8;

/// Returns the block size of the rotary kernel: (vectors, heads, positions). CUDA limits the third
/// dimension to 64.
dim3 threads_of_positions(std::int64_t vectors, std::int64_t heads) {
  const std::int64_t x = std::min<std::int64_t>(vectors, kThreads);
  const std::int64_t y = std::min(divide_up(heads, kHeadsOfThread), kThreads / x);
  const std::int64_t z = std::min<std::int64_t>(kThreads / (x * y), 64);
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

}  // namespace

void launch(const Rotary& call, Element type, cudaStream_t stream) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    const dim3 block = threads_of_positions(divide_up(call.half, N), most_heads(call));
    const unsigned grid = blocks_for(call.batch * call.sequence, block.z);
    rotary_kernel<T, N><<<grid, block, 0, stream>>>(call);
  });
}

// Embedding kernels: the look-up of rows of a table, the table's gradient, and a check of indices.

namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) embedding_kernel(Embedding call) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
       i < call.count; i += step) {
    // An index whose row is on another rank is valid. For an index outside of the table, all ranks
    // would silently return zeros, so the assertion must fail.
    CUDA_KERNEL_ASSERT(call.indices[i] >= 0 && call.indices[i] < call.total_rows);
    embedding_row<T, N>(call, i, threadIdx.x, blockDim.x);
  }
}

/// The x dimension of the launch grid has a block for each tile of sorted indices.
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

}  // namespace

void launch(const Embedding& call, Element type, cudaStream_t stream) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    unsigned of_row = 1;
    while (of_row < kThreads && of_row < divide_up(call.size, N)) {
      of_row *= 2;
    }
    const dim3 block(of_row, kThreads / of_row);
    embedding_kernel<T, N><<<blocks_for(call.count, block.y), block, 0, stream>>>(call);
  });
}

void launch(const EmbeddingBackward& call, Element type, cudaStream_t stream) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
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

// Cross-entropy kernels: one thread block for each row of logits.

namespace {

constexpr int kVectorsOfThread = 4;

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

__global__ void __launch_bounds__(kThreads) cross_entropy_rows_kernel(CrossEntropy call) {
  if (thread_of_grid() < call.logits.rows) {
    finish_row(call, thread_of_grid());
  }
}

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
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    const std::int64_t of_block = kThreads * kVectorsOfThread * N;
    const dim3 grid(blocks_for(in.columns, of_block),
                    static_cast<unsigned>(std::min(in.rows, kMostRows)));
    cross_entropy_backward_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

void launch(const Scale& call, Element type, cudaStream_t stream) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    const unsigned grid = blocks_for(call.size, kThreads * N);
    if (call.x_is_float) {
      scale_kernel<float, T, N><<<grid, kThreads, 0, stream>>>(call);
    } else {
      scale_kernel<T, T, N><<<grid, kThreads, 0, stream>>>(call);
    }
  });
}

// The kernel that quantises rows to fp8: one thread block for each row.

namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) quantize_fp8_kernel(QuantizeFp8 call) {
  Team<kThreads> block;
  for (std::int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    quantize_fp8_row<T, N>(call, row, block);
  }
}

}  // namespace

void launch(const QuantizeFp8& call, Element type, cudaStream_t stream) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    quantize_fp8_kernel<T, N><<<blocks_for(call.rows, 1), kThreads, 0, stream>>>(call);
  });
}

}  // namespace tessera::kernels
