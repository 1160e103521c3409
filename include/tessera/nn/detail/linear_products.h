#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// Products of Linears with one x. Backward adds the terms of x's gradient in the products
/// themselves (`addmm_` with beta = 1), where no communication is due and it is not recorded.
class LinearProducts {
 public:
  virtual ~LinearProducts() = default;
  /// As linear_product(); also of another x, which has a gradient by itself.
  virtual at::Tensor add(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) = 0;
};

/// Makes one for an x.
using MakeLinearProducts = std::unique_ptr<LinearProducts> (*)();
/// That of linear_product().
std::unique_ptr<LinearProducts> make_linear_products();

}  // namespace tessera::nn::detail
TESSERA_API_END
