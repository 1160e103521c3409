// CUDA driver functions that libtorch looks up by name. The fake library has the soname
// libcuda.so.1, so that dlopen() of libcuda.so.1 finds the loaded fake library.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "record/record.h"
#include "runtime/runtime.h"

namespace {

CUcontext context() {
  static int mark = 0;
  return reinterpret_cast<CUcontext>(&mark);
}

}  // namespace

using namespace fake_cuda;

extern "C" {

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  std::snprintf(name, static_cast<std::size_t>(size), "%s", properties.name);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
  *out = context();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = context();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "error of the fake CUDA driver";
  return CUDA_SUCCESS;
}

// Kernels that the program compiles at run time. The fake's CUfunction is the kernel's name.
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream handle, void**, void**) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const LaunchSizes sizes{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
  if (check_launch(reinterpret_cast<const char*>(function), sizes, kSharedBytesOptIn) !=
      cudaSuccess) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::lock_guard lock(record().mutex);
  ++record().launches[reinterpret_cast<const char*>(function)];
  ++record().streams[stream->id()].launches;
  return CUDA_SUCCESS;
}

}  // extern "C"
