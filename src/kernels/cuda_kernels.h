#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "device/vectors.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Returns the element type of tensor `x`, for which has_cuda_kernels() must be true.
inline Element element_of(const at::Tensor& x) {
  return x.scalar_type() == c10::ScalarType::Float      ? Element::kFloat
         : x.scalar_type() == c10::ScalarType::BFloat16 ? Element::kBFloat16
                                                        : Element::kHalf;
}

/// A function that runs the CUDA kernel of `call`. `like` gives the device and the dtype, and must
/// not be empty.
template <class Call>
using DeviceKernel = void (*)(const Call& call, const at::Tensor& like);

/// The CUDA kernels of libtessera_cuda.so, which registers the kernels when it is loaded. CPU
/// programs therefore need not load CUDA.
struct CudaKernels {
  void (*fill_random)(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key);
  void (*dropout)(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key);
  std::tuple<
      DeviceKernel<struct AdamW>, DeviceKernel<struct CheckIndices>, DeviceKernel<struct ClipNorm>,
      DeviceKernel<struct CrossEntropy>, DeviceKernel<struct CrossEntropyBackward>,
      DeviceKernel<struct Embedding>, DeviceKernel<struct EmbeddingBackward>,
      DeviceKernel<struct Pack>, DeviceKernel<struct QuantizeFp8>, DeviceKernel<struct RmsNorm>,
      DeviceKernel<struct RmsNormBackward>, DeviceKernel<struct Rotary>, DeviceKernel<struct Scale>,
      DeviceKernel<struct SiluMul>, DeviceKernel<struct SiluMulBackward>,
      DeviceKernel<struct SquareSums>, DeviceKernel<struct SumKinds>>
      device;
};

/// Registers the CUDA kernels. Called once, by the static initialisation of libtessera_cuda.so.
void register_cuda_kernels(const CudaKernels& kernels);
/// Returns the CUDA kernels. Throws Error if libtessera_cuda.so is not loaded.
const CudaKernels& cuda_kernels();

template <class Call>
void launch_cuda(const Call& call, const at::Tensor& like) {
  std::get<DeviceKernel<Call>>(cuda_kernels().device)(call, like);
}

}  // namespace tessera::kernels
TESSERA_API_END
