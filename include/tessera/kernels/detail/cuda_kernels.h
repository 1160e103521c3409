#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

struct AdamW;
struct CheckIndices;
struct ClipNorm;
struct CrossEntropy;
struct CrossEntropyBackward;
struct Embedding;
struct EmbeddingBackward;
struct Pack;
struct QuantizeFp8;
struct RmsNorm;
struct RmsNormBackward;
struct Rotary;
struct Scale;
struct SiluMul;
struct SiluMulBackward;
struct SquareSums;
struct SumKinds;

/// The CUDA kernels, which are in libtessera_cuda.so. It registers them when it is loaded, so that
/// CPU programs do not load CUDA.
struct CudaKernels {
  void (*fill_random)(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key);
  void (*dropout)(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key);
  // From src/kernels/device/. The call has the addresses; `like` is one of its tensors, which are
  // of one device and type, and not empty.
  void (*rms_norm)(const RmsNorm& call, const at::Tensor& like);
  void (*rms_norm_backward)(const RmsNormBackward& call, const at::Tensor& like);
  void (*rotary_embedding)(const Rotary& call, const at::Tensor& like);
  void (*silu_mul)(const SiluMul& call, const at::Tensor& like);
  void (*silu_mul_backward)(const SiluMulBackward& call, const at::Tensor& like);
  void (*cross_entropy)(const CrossEntropy& call, const at::Tensor& like);
  void (*cross_entropy_backward)(const CrossEntropyBackward& call, const at::Tensor& like);
  void (*scale)(const Scale& call, const at::Tensor& like);
  void (*embedding)(const Embedding& call, const at::Tensor& like);
  void (*embedding_backward)(const EmbeddingBackward& call, const at::Tensor& like);
  void (*check_indices)(const CheckIndices& call, const at::Tensor& like);
  void (*pack)(const Pack& call, const at::Tensor& like);
  void (*square_sums)(const SquareSums& call, const at::Tensor& like);
  void (*sum_kinds)(const SumKinds& call, const at::Tensor& like);
  void (*adamw)(const AdamW& call, const at::Tensor& like);
  void (*clip_norm)(const ClipNorm& call, const at::Tensor& like);
  void (*quantize_fp8)(const QuantizeFp8& call, const at::Tensor& like);
};

/// Called once, by the static initialisation of libtessera_cuda.so.
void register_cuda_kernels(const CudaKernels& kernels);
/// Throws Error if libtessera_cuda.so is not loaded.
const CudaKernels& cuda_kernels();

}  // namespace tessera::kernels
TESSERA_API_END
