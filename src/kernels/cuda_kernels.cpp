#include "tessera/kernels/cuda_kernels.h"

#include <atomic>

#include "tessera/core/error.h"

namespace tessera::kernels {
namespace {

std::atomic<const CudaKernels*> registered = nullptr;

}  // namespace

void register_cuda_kernels(const CudaKernels& kernels) {
  registered = new CudaKernels(kernels);
}

const CudaKernels& cuda_kernels() {
  const CudaKernels* kernels = registered;
  TESSERA_CHECK(
      kernels != nullptr,
      "a kernel was to run on CUDA, but libtessera_cuda.so is not loaded; build with a CUDA "
      "toolkit and use a world of device \"cuda\"");
  return *kernels;
}

}  // namespace tessera::kernels
