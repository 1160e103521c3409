#include "cuda_backend.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr auto kLibrary = "libtessera_cuda.so";

/// Beside the library that holds this function, wherever that is installed.
std::string library_path() {
  Dl_info info{};
  const bool found = dladdr(reinterpret_cast<const void*>(&library_path), &info) != 0;
  return found ? (std::filesystem::path(info.dli_fname).parent_path() / kLibrary).string()
               : kLibrary;
}

const CudaBackend& load() {
  // Never unloaded: its kernels and operators stay registered.
  void* const library = dlopen(library_path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  TESSERA_CHECK(library != nullptr, "device cuda: ", kLibrary, " cannot be loaded: ", dlerror(),
                "; build Tessera where the CUDA toolkit and NCCL are installed, or use device cpu");
  const auto function = reinterpret_cast<CudaBackendFunction>(dlsym(library, kCudaBackendSymbol));
  TESSERA_CHECK(function != nullptr, "device cuda: ", library_path(),
                " is of another version of Tessera; install both from one build");
  const CudaBackend& backend = *function();
  TESSERA_CHECK(
      backend.device_count() > 0,
      "device cuda: no GPU is visible here; check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
      "use device cpu");
  return backend;
}

}  // namespace

const CudaBackend& cuda_backend() {
  static const CudaBackend& backend = load();
  return backend;
}

}  // namespace tessera::comm
