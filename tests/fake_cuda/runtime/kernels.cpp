#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <regex>
#include <unordered_map>

#include "device/rms_norm.h"
#include "device/rotary.h"
#include "device/silu_mul.h"
#include "random_elements.h"
#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

using namespace tessera::kernels;

/// fill_kernel of src/kernels/random.cu, run by one thread.
template <class T, class Draw>
std::function<void()> fill(void** arguments) {
  return [data = *static_cast<T**>(arguments[0]), box = *static_cast<BoxView*>(arguments[1]),
          draw = *static_cast<Draw*>(arguments[2]), key = *static_cast<PhiloxKey*>(arguments[3])] {
    fill_elements(view_of(data), box, draw, key, /*first=*/0, /*step=*/1);
  };
}

/// dropout_kernel of the same file.
template <class T, class Compute>
std::function<void()> drop(void** arguments) {
  return
      [out = *static_cast<T**>(arguments[0]), x = *static_cast<const T**>(arguments[1]),
       box = *static_cast<BoxView*>(arguments[2]), p = *static_cast<double*>(arguments[3]),
       scale = *static_cast<Compute*>(arguments[4]), key = *static_cast<PhiloxKey*>(arguments[5])] {
        drop_elements(view_of(out), view_of(x), box, p, scale, key, /*first=*/0, /*step=*/1);
      };
}

/// Copies the arguments of a launch and returns its work on the host. Null for kernels that compute
/// nothing here.
using HostForm = std::function<void()> (*)(void** arguments);
using Forms = std::map<std::string, HostForm>;

/// The host forms for one element type, by the mangled names of their kernels.
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

/// The host form of the kernel with this mangled name.
HostForm host_form_of(const std::string& kernel) {
  // Demangling is slow, and libtorch registers thousands of kernels.
  if (kernel.find("7tessera") == std::string::npos) {
    return nullptr;
  }
  const std::string name = demangle(kernel.c_str());
  static const Forms forms = all_forms();
  const auto found = std::ranges::find_if(
      forms, [&](const auto& form) { return name.find(form.first) != std::string::npos; });
  return found == forms.end() ? nullptr : found->second;
}

using Offsets = std::vector<std::size_t>;

Offsets offsets_of_rotary() {
  Offsets offsets{offsetof(Rotary, cos), offsetof(Rotary, sin)};
  for (std::size_t part = 0; part < kMostRotaryParts; ++part) {
    const std::size_t begin = offsetof(Rotary, parts) + part * sizeof(RotaryHeads);
    offsets.push_back(begin + offsetof(RotaryHeads, x));
    offsets.push_back(begin + offsetof(RotaryHeads, out));
  }
  return offsets;
}

/// The offsets of the addresses, in the argument structures of kernels, that these access by
/// vectors.
const std::map<std::string, Offsets>& calls() {
  static const std::map<std::string, Offsets> once{
      {"silu_mul_kernel", {offsetof(SiluMul, gate), offsetof(SiluMul, up), offsetof(SiluMul, out)}},
      {"silu_mul_backward_kernel",
       {offsetof(SiluMulBackward, forward.gate), offsetof(SiluMulBackward, forward.up),
        offsetof(SiluMulBackward, grad), offsetof(SiluMulBackward, gate_grad),
        offsetof(SiluMulBackward, up_grad)}},
      {"rms_norm_kernel",
       {offsetof(RmsNorm, x), offsetof(RmsNorm, residual), offsetof(RmsNorm, weight),
        offsetof(RmsNorm, sum), offsetof(RmsNorm, out)}},
      {"rms_norm_backward_kernel",
       {offsetof(RmsNormBackward, forward.x), offsetof(RmsNormBackward, forward.weight),
        offsetof(RmsNormBackward, grad), offsetof(RmsNormBackward, sum_grad),
        offsetof(RmsNormBackward, x_grad)}},
      {"rotary_kernel", offsets_of_rotary()}};
  return once;
}

/// The offsets of addresses in the argument of a fused kernel of Tessera (src/kernels/device) that
/// accesses 16 bytes at a time.
Offsets addresses_of_vector_call(const std::string& kernel) {
  // Demangling is slow, and libtorch registers thousands of kernels.
  if (kernel.find("7tessera") == std::string::npos) {
    return {};
  }
  const std::string name = demangle(kernel.c_str());
  // The first number among the template arguments is the number of elements per access.
  static const std::regex pattern(R"(::(\w+)<[^<>]*?, (\d+))");
  std::smatch found;
  if (!std::regex_search(name, found, pattern) || found[2] == "1") {
    return {};
  }
  const auto call = calls().find(found[1]);
  return call == calls().end() ? Offsets{} : call->second;
}

/// cudaSuccess if each of the device addresses is a multiple of 16, else the result of
/// refuse_launch(). On a card the kernel would fail.
cudaError_t check_vector_call(const char* kernel, const void* argument, const Offsets& offsets) {
  for (const std::size_t offset : offsets) {
    const void* address = nullptr;
    std::memcpy(&address, static_cast<const std::byte*>(argument) + offset, sizeof(address));
    if (reinterpret_cast<std::uintptr_t>(address) % kVectorBytes != 0 &&
        kind_of(address) == MemoryKind::kDevice) {
      return refuse_launch("a misaligned access of 16 bytes: " + demangle(kernel),
                           cudaErrorMisalignedAddress);
    }
  }
  return cudaSuccess;
}

// Kernels are registered when libraries are loaded. A launch is counted, and computes if the kernel
// has a host form.

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

// The calls that nvcc generates. NVIDIA's header declares them only for nvcc.
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
