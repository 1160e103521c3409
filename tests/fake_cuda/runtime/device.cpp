#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

constexpr std::uint64_t kThreads = 1024;
constexpr unsigned kBlockZ = 64;
constexpr unsigned kGridX = 2147483647;
constexpr unsigned kGridYZ = 65535;

thread_local cudaError_t last_error = cudaSuccess;

std::uint64_t product(const dim3& size) {
  return std::uint64_t{size.x} * size.y * size.z;
}

std::string text(const dim3& size) {
  return std::to_string(size.x) + "x" + std::to_string(size.y) + "x" + std::to_string(size.z);
}

bool fits(const LaunchSizes& sizes) {
  const dim3& grid = sizes.grid;
  const dim3& block = sizes.block;
  return product(grid) > 0 && grid.x <= kGridX && grid.y <= kGridYZ && grid.z <= kGridYZ &&
         product(block) > 0 && product(block) <= kThreads && block.z <= kBlockZ;
}

}  // namespace

cudaError_t check_launch(const char* kernel, const LaunchSizes& sizes, std::size_t shared_limit) {
  if (!fits(sizes)) {
    return refuse_launch("a launch of " + text(sizes.grid) + " blocks of " + text(sizes.block) +
                             " threads: " + demangle(kernel),
                         cudaErrorInvalidConfiguration);
  }
  if (sizes.shared_bytes > shared_limit) {
    return refuse_launch("a launch with " + std::to_string(sizes.shared_bytes) +
                             " bytes of shared memory, of " + std::to_string(shared_limit) +
                             " that the kernel may have: " + demangle(kernel),
                         cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t refuse_launch(const std::string& what, cudaError_t error) {
  count_violation(what);
  last_error = error;
  return error;
}

cudaError_t last_launch_error() {
  return last_error;
}

void clear_launch_error() {
  last_error = cudaSuccess;
}

namespace {

thread_local int device_of_thread = 0;

cudaDeviceProp h200() {
  cudaDeviceProp h200{};
  constexpr std::string_view kName = "NVIDIA H200";
  std::copy(kName.begin(), kName.end(), h200.name);
  h200.major = 9;
  h200.minor = 0;
  h200.multiProcessorCount = 132;
  h200.totalGlobalMem = static_cast<std::size_t>(kDeviceBytes);
  h200.sharedMemPerBlock = 48 << 10;
  h200.sharedMemPerBlockOptin = 227 << 10;
  h200.sharedMemPerMultiprocessor = 228 << 10;
  h200.regsPerBlock = 64 << 10;
  h200.regsPerMultiprocessor = 64 << 10;
  h200.warpSize = 32;
  h200.maxThreadsPerBlock = 1024;
  h200.maxThreadsPerMultiProcessor = 2048;
  h200.maxBlocksPerMultiProcessor = 32;
  h200.maxThreadsDim[0] = h200.maxThreadsDim[1] = 1024;
  h200.maxThreadsDim[2] = 64;
  h200.maxGridSize[0] = 2147483647;
  h200.maxGridSize[1] = h200.maxGridSize[2] = 65535;
  h200.l2CacheSize = 60 << 20;
  h200.memPitch = 2147483647;
  h200.textureAlignment = 512;
  h200.unifiedAddressing = 1;
  return h200;
}

int attribute(cudaDeviceAttr name) {
  const cudaDeviceProp properties = h200();
  switch (name) {
    case cudaDevAttrComputeCapabilityMajor:
      return properties.major;
    case cudaDevAttrComputeCapabilityMinor:
      return properties.minor;
    case cudaDevAttrMultiProcessorCount:
      return properties.multiProcessorCount;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return static_cast<int>(properties.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(properties.sharedMemPerBlockOptin);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(properties.sharedMemPerMultiprocessor);
    case cudaDevAttrMaxThreadsPerBlock:
      return properties.maxThreadsPerBlock;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return properties.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxRegistersPerBlock:
      return properties.regsPerBlock;
    case cudaDevAttrMaxGridDimX:
      return properties.maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return properties.maxGridSize[1];
    case cudaDevAttrWarpSize:
      return properties.warpSize;
    case cudaDevAttrL2CacheSize:
      return properties.l2CacheSize;
    default:
      return 0;
  }
}

}  // namespace

// Disables cuDNN attention: cuDNN contains a CUDA runtime, which would look for a real device.
[[gnu::constructor]] void switch_cudnn_attention_off() {
  setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1", /*overwrite=*/1);
}

int current_device() {
  return device_of_thread;
}

void use_device() {
  if (!has_context(device_of_thread)) {
    CallStack stack = take_stack();
    const std::lock_guard lock(record().mutex);
    record().contexts.try_emplace(device_of_thread, std::move(stack));
  }
}

bool has_context(int device) {
  const std::lock_guard lock(record().mutex);
  return record().contexts.contains(device);
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) {
    return cudaErrorInvalidDevice;
  }
  count_call("cudaSetDevice");
  device_of_thread = device;
  use_device();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = h200();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = attribute(name);
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  count_call("cudaDeviceSynchronize");
  count_host_sync("cudaDeviceSynchronize");
  wait_for_all_streams();
  return cudaSuccess;
}

// cudaGetLastError() reports only launch errors, because all other calls return their errors.
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_launch_error();
  clear_launch_error();
  return error;
}

cudaError_t cudaPeekAtLastError() {
  return last_launch_error();
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorNotSupported:
      return "operation not supported by the fake CUDA";
    default:
      return "error of the fake CUDA";
  }
}

const char* cudaGetErrorName(cudaError_t error) {
  return cudaGetErrorString(error);
}

// Finds no function: the fake lacks the driver interface of newer CUDA versions.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) {
    *result = cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // extern "C"
