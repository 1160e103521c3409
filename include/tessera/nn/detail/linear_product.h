#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// aten::linear of x, (..., in), weight, (out, in), and bias, (out) or undefined. For the gradient
/// of the weight x is kept as a KeptTensor.
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace tessera::nn::detail
TESSERA_API_END
