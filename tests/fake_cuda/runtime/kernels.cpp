#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "random_elements.h"
#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

using namespace tessera::kernels;

/// Returns a host version of fill_kernel (src/kernels/random.cu), which runs in a single thread.
template <class T, class Draw>
std::function<void()> fill(void** arguments) {
  return [data = *static_cast<T**>(arguments[0]), box = *static_cast<BoxView*>(arguments[1]),
          draw = *static_cast<Draw*>(arguments[2]), key = *static_cast<PhiloxKey*>(arguments[3])] {
    fill_elements(view_of(data), box, draw, key, /*first=*/0, /*step=*/1);
  };
}

/// Returns a host version of dropout_kernel (src/kernels/random.cu), which runs in a single thread.
template <class T, class Compute>
std::function<void()> drop(void** arguments) {
  return
      [out = *static_cast<T**>(arguments[0]), x = *static_cast<const T**>(arguments[1]),
       box = *static_cast<BoxView*>(arguments[2]), p = *static_cast<double*>(arguments[3]),
       scale = *static_cast<Compute*>(arguments[4]), key = *static_cast<PhiloxKey*>(arguments[5])] {
        drop_elements(view_of(out), view_of(x), box, p, scale, key, /*first=*/0, /*step=*/1);
      };
}

/// The host version of a kernel: copies the launch arguments, and returns a function that computes
/// the kernel. nullptr: the fake counts the kernel's launches but computes nothing.
using HostForm = std::function<void()> (*)(void** arguments);
using Forms = std::map<std::string, HostForm>;

template <class T, class Compute>
Forms forms_of(const std::string& type, const std::string& compute) {
  const auto fill_kernel = [&](const std::string& draw) {
    return "::fill_kernel<" + type + ", tessera::kernels::" + draw + ">(";
  };
  return {{fill_kernel("Uniform"), &fill<T, Uniform>},
          {fill_kernel("Normal"), &fill<T, Normal>},
          {fill_kernel("TruncatedNormal"), &fill<T, TruncatedNormal>},
          {fill_kernel("Bernoulli"), &fill<T, Bernoulli>},
          {"::dropout_kernel<" + type + ", " + compute + ">(", &drop<T, Compute>}};
}

Forms all_forms() {
  Forms forms = forms_of<float, float>("float", "float");
  forms.merge(forms_of<double, double>("double", "double"));
  forms.merge(forms_of<c10::Half, float>("c10::Half", "float"));
  forms.merge(forms_of<c10::BFloat16, float>("c10::BFloat16", "float"));
  return forms;
}

/// Returns the host version of the kernel with this mangled name, or nullptr.
HostForm host_form_of(const std::string& kernel) {
  // Skips foreign kernels by their mangled names: demangling thousands of names would be slow.
  if (kernel.find("7tessera") == std::string::npos) {
    return nullptr;
  }
  const std::string name = demangle(kernel.c_str());
  static const Forms forms = all_forms();
  const auto found = std::ranges::find_if(
      forms, [&](const auto& form) { return name.find(form.first) != std::string::npos; });
  return found == forms.end() ? nullptr : found->second;
}

// Libraries register their kernels when they are loaded. The fake counts all launches. Kernels with
// a host version (HostForm) are also computed.

struct Kernel {
  const char* name;
  HostForm form;
  std::size_t shared_limit = kSharedBytes;
};

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, Kernel> by_function;  ///< key: address of the host function
};

Kernels& kernels() {
  static auto* const once = new Kernels;
  return *once;
}

Kernel find_kernel(const void* function) {
  const std::lock_guard lock(kernels().mutex);
  const auto found = kernels().by_function.find(function);
  return found == kernels().by_function.end()
             ? Kernel{"unregistered kernel", nullptr, kSharedBytesOptIn}
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
  const cudaError_t refused = check_launch(kernel.name, sizes, kernel.shared_limit);
  if (refused != cudaSuccess) {
    return refused;
  }
  count_launch(kernel.name, *stream);
  if (kernel.form != nullptr) {
    stream->submit(kernel.form(arguments));
  }
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

// Functions that nvcc-generated code calls. NVIDIA's header declares them only for nvcc.
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
  kernels().by_function[function] = {name, host_form_of(name)};
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
