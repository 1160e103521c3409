#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// The CUDA kernels, which are in libtessera_cuda.so. It registers them when it is loaded, so that
/// CPU programs do not load CUDA.
struct CudaKernels {
  void (*fill_random)(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key);
  void (*dropout)(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key);
};

/// Called once, by the static initialisation of libtessera_cuda.so.
void register_cuda_kernels(const CudaKernels& kernels);
/// Throws Error if libtessera_cuda.so is not loaded.
const CudaKernels& cuda_kernels();

}  // namespace tessera::kernels
TESSERA_API_END
