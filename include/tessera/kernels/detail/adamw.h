#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// The tensors of one AdamW update: equal sizes, dense, on one device.
struct AdamWTensors {
  at::Tensor parameter;   ///< the parameter, fp32
  at::Tensor gradient;    ///< the gradient, fp32; not changed
  at::Tensor exp_avg;     ///< first moment, fp32 or bf16
  at::Tensor exp_avg_sq;  ///< second moment, of the type of exp_avg
  at::Tensor step;        ///< number of this step, counted from 1: 0-d fp32
  /// For bf16 moments: the indices of the elements in the whole tensor, and the stream of random
  /// numbers for stochastic rounding.
  GlobalPlace place = {};
  std::vector<std::int64_t> local_sizes = {};  ///< sizes to which the tensors are reshaped for
                                               ///< `place`
  std::uint64_t stream = 0;
};

/// The hyperparameters of an AdamW update, for a group of parameters.
struct AdamWNumbers {
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  std::uint64_t seed = 0;  ///< seed of the random numbers for rounding
  at::Tensor lr = {};      ///< learning rate: 0-d fp64, on the device of the tensors
  /// Factor by which the gradients are multiplied: 0-d fp64, on the device of the tensors.
  /// Undefined: no factor. If the factor is infinite or NaN, adamw() changes no tensor.
  at::Tensor gradient_factor = {};
};

/// Whether adamw() has a kernel for fp32 moments on the device of `parameter`. Only GPUs have one.
bool has_adamw_kernel(const at::Tensor& parameter);

/// One step of AdamW (Loshchilov & Hutter 2019) for tensors whose moments have one type, computed
/// in fp32. On CUDA one launch updates dozens of tensors; on a CPU all threads are used. Moments in
/// bf16 are rounded stochastically, without bias, by a random number that depends on the element in
/// the whole tensor, the stream and the step: the result has the same bits on every mesh and
/// device. The parameter's update uses the moments before rounding. Not recorded by autograd.
void adamw(const std::vector<AdamWTensors>& tensors, const AdamWNumbers& numbers);

}  // namespace tessera::kernels
TESSERA_API_END
