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

}  // namespace tessera::kernels
TESSERA_API_END
