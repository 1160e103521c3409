// Quantises rows to fp8 on a GPU: one block for each row, or two kernels for rows that are columns
// in memory.
#include <algorithm>

#include "device/launch_sizes.h"
#include "device/launches.h"
#include "device/team.h"

namespace tessera::kernels {
namespace {

constexpr int kTile = 32;                 // rows and columns that a block transposes
constexpr int kTileRows = 8;              // threads in the block's second dimension
constexpr std::int64_t kMostParts = 512;  // maximum number of parts of the columns, for the maxima

template <class T, int N>
__global__ void __launch_bounds__(kThreads) quantize_fp8_kernel(QuantizeFp8 call) {
  Team<kThreads> block;
  for (std::int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    quantize_fp8_row<T, N>(call, row, block);
  }
}

/// One thread for each row and each part of the columns. The maximum of integers does not depend on
/// the order.
template <class T>
__global__ void __launch_bounds__(kThreads) largest_of_columns_kernel(QuantizeFp8 call) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < call.rows) {
    atomicMax(call.maxima + row, largest_of_columns<T>(call, row, blockIdx.y, gridDim.y));
  }
}

/// Reads along the rows, which are adjacent in memory, and writes along the columns.
template <class T>
__global__ void __launch_bounds__(kTile* kTileRows) turn_to_fp8_kernel(QuantizeFp8 call) {
  __shared__ std::uint8_t tile[kTile][kTile + 4];
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const std::int64_t columns_at_once = static_cast<std::int64_t>(gridDim.y) * kTile;
  for (std::int64_t first_column = static_cast<std::int64_t>(blockIdx.y) * kTile;
       first_column < call.columns; first_column += columns_at_once) {
    for (int i = threadIdx.y; i < kTile; i += kTileRows) {
      const std::int64_t row = first_row + threadIdx.x;
      if (row < call.rows && first_column + i < call.columns) {
        tile[threadIdx.x][i] = fp8_code_at<T>(call, row, first_column + i);
      }
    }
    __syncthreads();
    for (int i = threadIdx.y; i < kTile; i += kTileRows) {
      const std::int64_t row = first_row + i;
      const std::int64_t column = first_column + threadIdx.x;
      if (row < call.rows && column < call.columns) {
        call.values[row * call.columns + column] = tile[i][threadIdx.x];
      }
      if (blockIdx.y == 0 && first_column == 0 && threadIdx.x == 0 && row < call.rows) {
        call.scales[row] = fp8_scale(call.maxima[row]);
      }
    }
    __syncthreads();
  }
}

void launch_by_rows(const QuantizeFp8& call, Element type, cudaStream_t stream) {
  const std::int64_t elements = kVectorBytes / bytes_of(type);
  const bool aligned = is_aligned(call.x, call.rows, call.row_stride, type) &&
                       is_aligned(call.factors, 1, 0, Element::kFloat) &&
                       call.columns % elements == 0;
  with_vectors(type, aligned, [&]<class T, int N>() {
    const auto grid = static_cast<unsigned>(std::min<std::int64_t>(call.rows, 1 << 30));
    quantize_fp8_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

void launch_by_columns(const QuantizeFp8& call, Element type, cudaStream_t stream) {
  const auto parts = static_cast<unsigned>(std::min(call.columns, kMostParts));
  const auto tiles =
      static_cast<unsigned>(std::min<std::int64_t>(divide_up(call.columns, kTile), 65535));
  with_vectors(type, /*aligned=*/false, [&]<class T, int>() {
    const dim3 searches(static_cast<unsigned>(divide_up(call.rows, kThreads)), parts);
    largest_of_columns_kernel<T><<<searches, kThreads, 0, stream>>>(call);
    const dim3 grid(static_cast<unsigned>(divide_up(call.rows, kTile)), tiles);
    turn_to_fp8_kernel<T><<<grid, dim3(kTile, kTileRows), 0, stream>>>(call);
  });
}

}  // namespace

void launch(const QuantizeFp8& call, Element type, cudaStream_t stream) {
  call.column_stride == 1 ? launch_by_rows(call, type, stream)
                          : launch_by_columns(call, type, stream);
}

}  // namespace tessera::kernels
