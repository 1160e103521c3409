// The table of libtessera_cuda.so: see cuda_backend.h.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDAFunctions.h>
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "cuda/cuda_backend.h"
#include "tessera/export.h"

namespace tessera::comm {
namespace {

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
}

/// libtorch packs three numbers into one.
int nccl_of_libtorch() {
  const std::uint64_t packed = torch::cuda::nccl::version();
  constexpr std::uint64_t kPart = 0xffff;
  return static_cast<int>((packed >> 32) * 10000 + (packed >> 16 & kPart) * 100 + (packed & kPart));
}

LibraryVersions versions() {
  LibraryVersions versions{.nccl_header = NCCL_VERSION_CODE, .nccl_libtorch = nccl_of_libtorch()};
  ncclGetVersion(&versions.nccl_loaded);
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (hooks.hasCuDNN()) {
    versions.cudnn_libtorch = static_cast<int>(hooks.versionCuDNN());
    versions.cudnn_loaded = static_cast<int>(hooks.versionRuntimeCuDNN());
  }
  return versions;
}

std::string nccl_record() {
  return c10d::dump_nccl_trace(/*includeCollectives=*/true, /*includeStackTraces=*/false,
                               /*onlyActive=*/false);
}

/// The table that cuda_backend() finds.
constexpr CudaBackend kBackend{device_count,           set_device,  versions,
                               make_nccl_communicator, nccl_record, make_cuda_streams};

}  // namespace
}  // namespace tessera::comm

extern "C" TESSERA_API const tessera::comm::CudaBackend* tessera_cuda_backend() {
  return &tessera::comm::kBackend;
}
