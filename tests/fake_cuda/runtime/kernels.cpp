// Kernels: libraries register them when they are loaded; a launch is counted, and computes where
// the kernel has a form for the host.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "record/record.h"
#include "runtime/device.h"
#include "runtime/host_forms.h"
#include "runtime/limits.h"
#include "runtime/stream.h"
#include "runtime/vector_access.h"

namespace fake_cuda {
namespace {

struct Kernel {
  const char* name;
  HostForm form;
  std::vector<std::size_t> vectors = {};  ///< in its argument: see addresses_of_vector_call
  std::size_t shared_limit = kSharedBytes;
};

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, Kernel> by_function;  ///< the host's
};

Kernels& kernels() {
  static auto* const once = new Kernels;
  return *once;
}

Kernel find_kernel(const void* function) {
  const std::lock_guard lock(kernels().mutex);
  const auto found = kernels().by_function.find(function);
  return found == kernels().by_function.end()
             ? Kernel{"unregistered kernel", nullptr, {}, kSharedBytesOptIn}
             : found->second;
}

void count_launch(const char* kernel, const Stream& stream) {
  const std::lock_guard lock(record().mutex);
  ++record().launches[kernel];
  ++record().streams[stream.id()].launches;
}

cudaError_t launch(const void* function, const LaunchSizes& sizes, void** arguments,
                   cudaStream_t handle) {
  use_device();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  const Kernel kernel = find_kernel(function);
  cudaError_t refused = check_launch(kernel.name, sizes, kernel.shared_limit);
  if (refused == cudaSuccess && !kernel.vectors.empty()) {
    refused = check_vector_call(kernel.name, arguments[0], kernel.vectors);
  }
  if (refused != cudaSuccess) {
    return refused;
  }
  const Stream::Work work = kernel.form == nullptr ? nullptr : kernel.form(arguments);
  enqueue(*stream, [name = kernel.name, work](Stream& on) {
    count_launch(name, on);
    if (work != nullptr) {
      on.submit(work);
    }
  });
  return cudaSuccess;
}

struct Configuration {
  LaunchSizes sizes;
  cudaStream_t stream = nullptr;
};
thread_local Configuration configuration;

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

// What code compiled by nvcc calls. NVIDIA's header declares these for nvcc alone.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

char __cudaInitModule(void**) {
  return 1;
}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(kernels().mutex);
  kernels().by_function[function] = {name, host_form_of(name), addresses_of_vector_call(name)};
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes,
                                     cudaStream_t stream) {
  configuration = {{grid, block, shared_bytes}, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes,
                                       void* stream) {
  *grid = configuration.sizes.grid;
  *block = configuration.sizes.block;
  *shared_bytes = configuration.sizes.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared_bytes, cudaStream_t stream) {
  return launch(kernel, {grid, block, shared_bytes}, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes, cudaStream_t stream) {
  return launch(function, {grid, block, shared_bytes}, arguments, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                        void** arguments, std::size_t shared_bytes,
                                        cudaStream_t stream) {
  return launch(function, {grid, block, shared_bytes}, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return launch(function, {config->gridDim, config->blockDim, config->dynamicSmemBytes}, arguments,
                config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute name, int value) {
  if (name != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return cudaSuccess;
  }
  const auto bytes = static_cast<std::size_t>(value);
  if (value < 0 || bytes > kSharedBytesOptIn) {
    return cudaErrorInvalidValue;
  }
  const std::lock_guard lock(kernels().mutex);
  const auto found = kernels().by_function.find(function);
  if (found != kernels().by_function.end()) {
    found->second.shared_limit = std::max(bytes, kSharedBytes);
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   std::size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t) {
  *blocks = 2;
  return cudaSuccess;
}

}  // extern "C"
