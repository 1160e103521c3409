// Part of libtessera_cuda.so: makes its kernels known to the library when it is loaded.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "device/launches.h"
#include "random_cuda.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/cuda_kernels.h"

namespace tessera::kernels {
namespace {

Element element_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case c10::ScalarType::Float:
      return Element::kFloat;
    case c10::ScalarType::BFloat16:
      return Element::kBFloat16;
    case c10::ScalarType::Half:
      return Element::kHalf;
    default:
      fail("a fused kernel for CUDA was asked for a ", x.scalar_type(),
           " tensor; it takes fp32, bf16 or fp16");
  }
}

/// The tensor's device need not be the current one. Kernels run on the current stream, where the
/// caller's other work on the tensor is.
template <class Call>
void run(const Call& call, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  launch(call, element_of(like), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// The same for kernels of one type of elements.
template <class Call>
void run_of_one_type(const Call& call, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  launch(call, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

const bool kRegistered = [] {
  register_cuda_kernels({
      .fill_random = &fill_random_cuda,
      .dropout = &dropout_cuda,
      .rms_norm = &run<RmsNorm>,
      .rms_norm_backward = &run<RmsNormBackward>,
      .rotary_embedding = &run<Rotary>,
      .silu_mul = &run<SiluMul>,
      .silu_mul_backward = &run<SiluMulBackward>,
      .cross_entropy = &run<CrossEntropy>,
      .cross_entropy_backward = &run<CrossEntropyBackward>,
      .scale = &run<Scale>,
      .embedding = &run<Embedding>,
      .embedding_backward = &run<EmbeddingBackward>,
      .check_indices = &run_of_one_type<CheckIndices>,
      .pack = &run<Pack>,
      .square_sums = &run<SquareSums>,
      .sum_kinds = &run_of_one_type<SumKinds>,
      .adamw = &run<AdamW>,
      .clip_norm = &run_of_one_type<ClipNorm>,
      .quantize_fp8 = &run<QuantizeFp8>,
  });
  return true;
}();

}  // namespace
}  // namespace tessera::kernels
