#include "random_elements.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <variant>

// Random numbers and dropout on a GPU, for libtessera_cuda.so. random.cpp uses the same formulas.
// With --fmad=false, a GPU gives the same bits as a CPU.
namespace tessera::kernels {
namespace {

constexpr int kThreads = 256;

// Grid-stride loops: a thread processes every threads_of_grid()-th element, from the first element
// of the thread on.
__device__ std::int64_t first_of_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ std::int64_t threads_of_grid() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

template <class T, class Draw>
__global__ void fill_kernel(T* data, BoxView box, Draw draw, PhiloxKey key) {
  fill_elements(data, box, draw, key, first_of_thread(), threads_of_grid());
}

template <class T, class Compute>
__global__ void dropout_kernel(T* out, const T* x, BoxView box, double p, Compute scale,
                               PhiloxKey key) {
  drop_elements(out, x, box, p, scale, key, first_of_thread(), threads_of_grid());
}

unsigned blocks_for(const BoxView& box) {
  return static_cast<unsigned>(
      std::min<std::int64_t>((box.numel + kThreads - 1) / kThreads, 65536));
}

}  // namespace

void fill_random_cuda(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key) {
  // Kernels run on the current stream of the tensor's device, which need not be the current device.
  const c10::cuda::CUDAGuard guard(local.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const Box& box : place.boxes) {
    const BoxView view = box_view(box, place, local);
    // A launch with a grid of 0 blocks is an error.
    if (view.numel == 0) {
      continue;
    }
    with_float_type(local.scalar_type(), "a random fill", [&]<class T>() {
      T* data = static_cast<T*>(local.mutable_data_ptr());
      std::visit(
          [&](const auto& draw) {
            fill_kernel<T><<<blocks_for(view), kThreads, 0, stream>>>(data, view, draw, key);
          },
          distribution);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
}

void dropout_cuda(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const Box& box : place.boxes) {
    const BoxView view = box_view(box, place, x);
    if (view.numel == 0) {
      continue;
    }
    with_float_type(x.scalar_type(), "dropout", [&]<class T>() {
      using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
      const auto scale = static_cast<Compute>(1.0 / (1.0 - p));
      dropout_kernel<T, Compute><<<blocks_for(view), kThreads, 0, stream>>>(
          static_cast<T*>(out.mutable_data_ptr()), static_cast<const T*>(x.const_data_ptr()), view,
          p, scale, key);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
}

}  // namespace tessera::kernels
