#include "tessera/internals/detail/cuda_presence.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <typeinfo>

namespace tessera::detail {

/// The base class answers if CUDA is not loaded.
bool has_found_cuda() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  return typeid(hooks) != typeid(at::CUDAHooksInterface);
}

std::optional<CudnnVersions> cudnn_versions() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (!hooks.hasCuDNN()) {
    return std::nullopt;
  }
  return CudnnVersions{static_cast<int>(hooks.versionCuDNN()),
                       static_cast<int>(hooks.versionRuntimeCuDNN())};
}

}  // namespace tessera::detail
