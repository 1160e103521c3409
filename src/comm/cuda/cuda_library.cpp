// The function table of libtessera_cuda.so: see cuda_backend.h.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>

#include "cuda/cuda_backend.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d_nccl.h"
#include "tessera/internals/detail/devices.h"

namespace tessera::comm {
namespace {

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
}

LibraryVersions versions() {
  LibraryVersions versions{.nccl_header = NCCL_VERSION_CODE,
                           .nccl_libtorch = detail::nccl_of_libtorch()};
  ncclGetVersion(&versions.nccl_loaded);
  if (const auto cudnn = detail::cudnn_versions()) {
    versions.cudnn_libtorch = cudnn->built_with;
    versions.cudnn_loaded = cudnn->loaded;
  }
  return versions;
}

constexpr CudaBackend kBackend{device_count, set_device, versions, make_nccl_communicator,
                               make_cuda_streams};

}  // namespace
}  // namespace tessera::comm

extern "C" TESSERA_API const tessera::comm::CudaBackend* tessera_cuda_backend() {
  return &tessera::comm::kBackend;
}
