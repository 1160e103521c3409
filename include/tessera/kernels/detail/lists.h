// Operations on lists of tensors, with few launches on CUDA: copies, the 2-norm, and AdamW.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/kernels/detail/random.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Copies each tensor of `from` into the tensor of `to` at the same index. Sizes must be equal,
/// types can differ. Not recorded by autograd; on CUDA, version counters do not increase. On CUDA
/// one launch copies dozens of fp32, bf16 or fp16 tensors.
void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from,
              bool non_blocking = false);

// Functions for the 2-norm of many tensors on CUDA. The caller sums the squares over the ranks.

/// Whether squares_on_cuda() supports the tensors: `device` is a GPU, and each tensor is dense, on
/// `device`, and fp32, bf16 or fp16.
bool has_norm_kernels(const std::vector<at::Tensor>& tensors, c10::Device device);

/// Returns two fp64 sums of squares: of `owned`, which the caller adds over the ranks, and of
/// `plain`, which every rank has. `copies` are not added, but a NaN or infinity in `plain` or
/// `copies` makes the first sum NaN or infinite.
at::Tensor squares_on_cuda(const std::vector<at::Tensor>& owned,
                           const std::vector<at::Tensor>& plain,
                           const std::vector<at::Tensor>& copies, c10::Device device);

/// The results of clip_norm_on_cuda().
struct NormAndFactor {
  at::Tensor norm;     ///< the 2-norm, 0-d fp64
  at::Tensor factor;   ///< clip factor, 0-d fp64: min(1, max_norm / (norm + 1e-6))
  at::Tensor of_step;  ///< `factor`, but NaN if `norm` is NaN or infinite; for adamw()
  at::Tensor rounded;  ///< the 2-norm rounded to fp32, 0-d
};
/// Returns the norm and the clip factor of gradients. `squares`: the result of squares_on_cuda(),
/// summed over the ranks. Takes one launch.
NormAndFactor clip_norm_on_cuda(const at::Tensor& squares, double max_norm);

/// The tensors of one AdamW update: equal sizes, dense, on one device.
struct AdamWTensors {
  at::Tensor parameter;   ///< the parameter, fp32
  at::Tensor gradient;    ///< the gradient, fp32; not changed
  at::Tensor exp_avg;     ///< first moment of the gradient, fp32 or bf16
  at::Tensor exp_avg_sq;  ///< second moment, with the type of exp_avg
  at::Tensor step;        ///< the index of the optimizer step, from 1: 0-d fp32
  /// For bf16 moments: the index of each element in the global tensor. The index and `stream`
  /// select the random numbers for stochastic rounding.
  GlobalPlace place = {};
  /// Sizes of this rank's shard of the global tensor.
  std::vector<std::int64_t> local_sizes = {};
  std::uint64_t stream = 0;
};

/// The hyperparameters of an AdamW update, for a group of parameters.
struct AdamWNumbers {
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  std::uint64_t seed = 0;  ///< seed of the random numbers for stochastic rounding
  at::Tensor lr = {};      ///< learning rate: 0-d fp64, on the device of the tensors
  /// Factor by which the gradients are multiplied: 0-d fp64, on the device of the tensors.
  /// Undefined: no factor. If the factor is infinite or NaN, adamw() changes no tensor.
  at::Tensor gradient_factor = {};
};

/// Whether adamw() has a kernel for tensors on this device with fp32 moments. True for GPUs.
bool has_adamw_kernel(const at::Tensor& parameter);

/// Does one step of AdamW (Loshchilov & Hutter 2019), in fp32, without autograd. All moments have
/// one type; bf16 moments are rounded stochastically. The random numbers depend on the global
/// element index, the stream and the step, so every mesh and device gives the same bits.
void adamw(const std::vector<AdamWTensors>& tensors, const AdamWNumbers& numbers);

}  // namespace tessera::kernels
TESSERA_API_END
