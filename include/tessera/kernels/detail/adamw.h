#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// What AdamW updates together: tensors of equal sizes, dense, on one device.
struct AdamWTensors {
  at::Tensor parameter;   ///< fp32
  at::Tensor gradient;    ///< fp32; not changed
  at::Tensor exp_avg;     ///< fp32 or bf16
  at::Tensor exp_avg_sq;  ///< of the same type
  at::Tensor step;        ///< 0-d fp32: the step now made, from 1
  /// With bf16 moments: the elements of the whole tensor that these are, and the stream of random
  /// numbers that the moments are rounded by.
  GlobalPlace place = {};
  std::vector<std::int64_t> local_sizes = {};  ///< with which `place` views them
  std::uint64_t stream = 0;
};

/// The numbers of a group of parameters.
struct AdamWNumbers {
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  std::uint64_t seed = 0;  ///< of random numbers
  at::Tensor lr = {};      ///< 0-d fp64, on the device of the tensors
  /// The same; undefined: the gradients are taken as they are.
  at::Tensor gradient_factor = {};
};

/// Whether adamw() takes fp32 moments: it is for a GPU.
bool has_adamw_kernel(const at::Tensor& parameter);

/// One step of AdamW (Loshchilov & Hutter 2019) for tensors whose moments are of one type, computed
/// in fp32. On CUDA one launch for dozens of them; on a CPU by all threads. Moments in bf16 are
/// rounded up or down at random so that they are right in the mean, by a random number of the
/// element in the whole tensor, the stream and the step: with the same bits on every mesh and
/// device. The parameter takes the moments before they are rounded. Without autograd.
void adamw(const std::vector<AdamWTensors>& tensors, const AdamWNumbers& numbers);

}  // namespace tessera::kernels
TESSERA_API_END
