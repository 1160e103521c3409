// SwiGLU on a GPU. Like the other sources in this folder it uses only libtorch's half types, so
// nvcc compiles it within seconds.
#include <algorithm>

#include "device/launch_sizes.h"
#include "device/launches.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kMostBlocks = 65535;  // maximum size of a grid's second dimension

__device__ std::int64_t thread_of_row() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ std::int64_t threads_of_row() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(SiluMul call) {
  for (std::int64_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
    silu_mul_row<T, N>(call, row, thread_of_row(), threads_of_row());
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) silu_mul_backward_kernel(SiluMulBackward call) {
  for (std::int64_t row = blockIdx.y; row < call.forward.rows; row += gridDim.y) {
    silu_mul_backward_row<T, N>(call, row, thread_of_row(), threads_of_row());
  }
}

/// The grid has a thread for each vector of a row. If there are more rows than the grid's limit, a
/// block processes several rows.
dim3 grid_of_rows(std::int64_t rows, std::int64_t vectors) {
  return {static_cast<unsigned>(std::min<std::int64_t>(divide_up(vectors, kThreads), 1 << 30)),
          static_cast<unsigned>(std::min(rows, kMostBlocks))};
}

bool inputs_are_aligned(const SiluMul& call, Element type) {
  return is_aligned(call.gate, call.rows, call.gate_stride, type) &&
         is_aligned(call.up, call.rows, call.up_stride, type);
}

}  // namespace

void launch(const SiluMul& call, Element type, cudaStream_t stream) {
  const bool aligned =
      inputs_are_aligned(call, type) && is_aligned(call.out, call.rows, call.size, type);
  with_vectors(type, aligned, [&]<class T, int N>() {
    const dim3 grid = grid_of_rows(call.rows, divide_up(call.size, N));
    silu_mul_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

void launch(const SiluMulBackward& call, Element type, cudaStream_t stream) {
  const SiluMul& in = call.forward;
  const bool aligned = inputs_are_aligned(in, type) && is_aligned(in.out, in.rows, in.size, type) &&
                       is_aligned(call.grad, in.rows, in.size, type) &&
                       is_aligned(call.gate_grad, in.rows, call.gate_grad_stride, type) &&
                       is_aligned(call.up_grad, in.rows, call.up_grad_stride, type);
  with_vectors(type, aligned, [&]<class T, int N>() {
    const dim3 grid = grid_of_rows(in.rows, divide_up(in.size, N));
    silu_mul_backward_kernel<T, N><<<grid, kThreads, 0, stream>>>(call);
  });
}

}  // namespace tessera::kernels
