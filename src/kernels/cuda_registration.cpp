// Part of libtessera_cuda.so: registers this library's kernels when the library is loaded.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda_kernels.h"
#include "device/launches.h"
#include "random_elements.h"

namespace tessera::kernels {
namespace {

/// Launches the kernel of `call` on the current stream of the device of `like`. The device need not
/// be the current device.
template <class Call>
void run(const Call& call, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  // Some CUDA kernels support only one element type: their launch() has no type argument.
  if constexpr (requires { launch(call, stream); }) {
    launch(call, stream);
  } else {
    launch(call, element_of(like), stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class... Calls>
std::tuple<DeviceKernel<Calls>...> runs_of(const std::tuple<DeviceKernel<Calls>...>&) {
  return {&run<Calls>...};
}

const bool kRegistered = [] {
  register_cuda_kernels({.fill_random = &fill_random_cuda,
                         .dropout = &dropout_cuda,
                         .device = runs_of(decltype(CudaKernels::device)())});
  return true;
}();

}  // namespace
}  // namespace tessera::kernels
