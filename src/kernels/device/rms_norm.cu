// RMSNorm on a GPU: a warp processes a short row, a block a longer one.
#include "device/launch_sizes.h"
#include "device/launches.h"
#include "device/team.h"

namespace tessera::kernels {
namespace {

// Number of bytes of shared memory that every kernel may use.
constexpr std::int64_t kSharedBytes = 48 << 10;

template <class T, class W, int N, int kWidth>
__global__ void __launch_bounds__(kRmsNormThreads) rms_norm_kernel(RmsNorm call) {
  Team<kWidth, kRmsNormThreads> team;
  // Number of vectors that a thread loads at once; more for a warp, whose threads have more
  // elements of a row.
  constexpr int kAtOnce = kWidth == kWarp ? 4 : 2;
  constexpr std::int64_t kTeams = decltype(team)::kOfBlock;
  for (std::int64_t row = blockIdx.x * kTeams + team.number(); row < call.rows;
       row += gridDim.x * kTeams) {
    rms_norm_row<T, W, N, kAtOnce>(call, row, team);
  }
}

/// Sums each team's terms of the weight's gradient in shared memory, or in `terms` if the sums do
/// not fit into shared memory.
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

constexpr int kTermRows = 8;  // number of rows of terms that a block adds at the same time

/// One thread for each element, and for every eighth row of `terms`.
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

/// Calls body.operator()<T, W, N, kWidth>() for a block of `kBlock` threads. A row of up to
/// `short_row` elements is processed by a warp, a longer row by a block.
template <int kBlock, class Body>
void with_kernel(const RmsNorm& call, Element type, bool aligned, std::int64_t short_row,
                 Body&& body) {
  with_vectors(type, aligned, [&]<class T, int N>() {
    const auto of_weight = [&]<class W>() {
      // No separate kernel for short rows with access by single elements, which is rare.
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

bool rows_are_aligned(const RmsNorm& call, const void* data, Element type) {
  return is_aligned(data, call.rows, call.size, type);
}

bool inputs_are_aligned(const RmsNorm& call, Element type) {
  return rows_are_aligned(call, call.x, type) && rows_are_aligned(call, call.residual, type) &&
         is_aligned(call.weight, 1, 0, type);
}

}  // namespace

void launch(const RmsNorm& call, Element type, cudaStream_t stream) {
  const bool aligned = inputs_are_aligned(call, type) && rows_are_aligned(call, call.sum, type) &&
                       rows_are_aligned(call, call.out, type);
  with_kernel<kRmsNormThreads>(
      call, type, aligned, kShortRow, [&]<class T, class W, int N, int kWidth>() {
        const std::int64_t blocks = divide_up(call.rows, kRmsNormThreads / kWidth);
        const auto grid = static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 30));
        rms_norm_kernel<T, W, N, kWidth><<<grid, kRmsNormThreads, 0, stream>>>(call);
      });
}

void launch(const RmsNormBackward& call, Element type, cudaStream_t stream) {
  const RmsNorm& in = call.forward;
  const bool aligned = inputs_are_aligned(in, type) && rows_are_aligned(in, call.grad, type) &&
                       rows_are_aligned(in, call.sum_grad, type) &&
                       rows_are_aligned(in, call.x_grad, type);
  const auto blocks = static_cast<unsigned>(rms_norm_blocks(in.rows, in.size));
  with_kernel<kRmsNormBackwardThreads>(
      in, type, aligned, kShortBackwardRow, [&]<class T, class W, int N, int kWidth>() {
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

}  // namespace tessera::kernels
