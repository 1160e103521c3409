// Many tensors in one pass: copies and casts, and their norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Copies each tensor of `from` into the tensor of `to` at its place, of equal sizes and of any
/// type. On CUDA it is one launch for dozens of tensors of fp32, bf16 or fp16 that lie in rows;
/// others are copied one by one. Without autograd, also without a count of the writes on CUDA.
void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from,
              bool non_blocking = false);

// The 2-norm of many tensors on CUDA in three steps: squares of this rank, their sum over ranks by
// the caller, the root.

/// Whether squares_on_cuda() takes them: tensors of `device`, a GPU, of fp32, bf16 or fp16, and
/// dense.
bool has_norm_kernels(const std::vector<at::Tensor>& tensors, c10::Device device);

/// fp64 (2): what the ranks are to add up, and the sum of the squares of `plain`, which all ranks
/// have. The first is that of `owned`; values that are not finite in `plain` or `copies` make it
/// so, too. With the same bits for the same sizes, whatever the device. Two launches for a hundred
/// tensors of one type.
at::Tensor squares_on_cuda(const std::vector<at::Tensor>& owned,
                           const std::vector<at::Tensor>& plain,
                           const std::vector<at::Tensor>& copies, c10::Device device);

struct NormAndFactor {
  at::Tensor norm;     ///< 0-d fp64
  at::Tensor factor;   ///< 0-d fp64: min(1, max_norm / (norm + 1e-6))
  at::Tensor rounded;  ///< the norm, 0-d fp32
};
/// From what squares_on_cuda() returned. One launch.
NormAndFactor clip_norm_on_cuda(const at::Tensor& squares, double max_norm);

}  // namespace tessera::kernels
TESSERA_API_END
