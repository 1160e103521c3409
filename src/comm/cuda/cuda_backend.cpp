// How libtessera_cuda.so is loaded: once, at the first request for a GPU. A program that computes
// on CPU never maps CUDA's libraries.

#include "cuda/cuda_backend.h"

#include <dlfcn.h>

#include <string>

#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/devices.h"
#include "tessera/version.h"

namespace tessera::comm {
namespace {

constexpr auto kLibrary = "libtessera_cuda.so." TESSERA_SOVERSION;

/// Throws an Error that says which of four things is missing: the library, a matching version of
/// it, libtorch's knowledge of it, a GPU.
const CudaBackend& load() {
  const std::string path = detail::library_beside(reinterpret_cast<const void*>(&load), kLibrary);
  // Never unloaded: its kernels and operators stay registered.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TESSERA_CHECK(library != nullptr, "device cuda: ", kLibrary, " cannot be loaded: ", dlerror(),
                "; build Tessera where the CUDA toolkit and NCCL are installed, or use device cpu");
  const auto function = reinterpret_cast<CudaBackendFunction>(dlsym(library, kCudaBackendSymbol));
  TESSERA_CHECK(function != nullptr, "device cuda: ", path,
                " is of another version of Tessera; install both from one build");
  TESSERA_CHECK(detail::has_found_cuda(),
                "device cuda: libtorch has been used without CUDA in this process before (by a "
                "backward on CPU, pinned memory or at::getAccelerator()), and does not look for it "
                "again; make the world of device cuda first");
  const CudaBackend& backend = *function();
  TESSERA_CHECK(
      backend.device_count() > 0,
      "device cuda: no GPU is visible here; check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
      "use device cpu");
  return backend;
}

}  // namespace

const CudaBackend& cuda_backend() {
  // If loading throws, the next call tries again.
  static const CudaBackend& backend = load();
  return backend;
}

}  // namespace tessera::comm
