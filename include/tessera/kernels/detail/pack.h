// Operations on many tensors in one pass: copies with casts, and the 2-norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Copies each tensor of `from` into the corresponding tensor of `to`, with equal sizes and any
/// types. On CUDA one launch copies dozens of fp32, bf16 or fp16 tensors that consist of rows;
/// other tensors are copied one by one. Not recorded by autograd; on CUDA the version counters are
/// not incremented.
void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from,
              bool non_blocking = false);

// The 2-norm of many tensors on CUDA in three steps: compute this rank's sums of squares, add them
// over the ranks (which the caller does), and take the root.

/// Whether squares_on_cuda() supports the tensors: they must be dense fp32, bf16 or fp16 tensors on
/// `device`, a GPU.
bool has_norm_kernels(const std::vector<at::Tensor>& tensors, c10::Device device);

/// Returns two fp64 numbers. The first is the sum of squares of `owned`, which the caller must add
/// over the ranks; it is not finite if a value in `plain` or `copies` is not finite. The second is
/// the sum of squares of `plain`, which all ranks have. The bits depend only on the values and
/// sizes, not on the device. A hundred tensors of one type take two launches.
at::Tensor squares_on_cuda(const std::vector<at::Tensor>& owned,
                           const std::vector<at::Tensor>& plain,
                           const std::vector<at::Tensor>& copies, c10::Device device);

struct NormAndFactor {
  at::Tensor norm;     ///< the norm, 0-d fp64
  at::Tensor factor;   ///< clip factor, 0-d fp64: min(1, max_norm / (norm + 1e-6))
  at::Tensor of_step;  ///< factor of an optimizer step, 0-d fp64: `factor`, or NaN if the norm is
                       ///< not finite
  at::Tensor rounded;  ///< the norm rounded to fp32, 0-d
};
/// The norm and the clip factor, from the result of squares_on_cuda() after it was added over the
/// ranks. Takes one launch.
NormAndFactor clip_norm_on_cuda(const at::Tensor& squares, double max_norm);

}  // namespace tessera::kernels
TESSERA_API_END
