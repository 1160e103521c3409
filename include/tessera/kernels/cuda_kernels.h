#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/random.h"

namespace tessera::kernels {

/// The kernels that libtessera_cuda.so brings along; it registers them when it is loaded.
struct CudaKernels {
  void (*fill_random)(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key);
  void (*dropout)(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key);
};

void register_cuda_kernels(const CudaKernels& kernels);
/// Throws Error if libtessera_cuda.so is not loaded.
const CudaKernels& cuda_kernels();

}  // namespace tessera::kernels
