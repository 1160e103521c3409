#pragma once

#include <torch/csrc/autograd/function.h>

#include <string>
#include <utility>

#include "tensor/tensor_spec.h"

namespace tessera::detail {

/// Where a distributed tensor gave away its local one. What the caller's code gives is a local
/// tensor as well: it is this rank's part of a gradient with the layout in `spec`. Sizes are the
/// global ones, for a local gradient tells its own only.
struct ToLocalBackward final : torch::autograd::Node {
  ToLocalBackward(TensorSpecPtr s, LayoutPtr l) : spec(std::move(s)), layout(std::move(l)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "ToLocalBackward"; }
  TensorSpecPtr spec;  ///< of the gradient
  LayoutPtr layout;    ///< of the distributed tensor
};

}  // namespace tessera::detail
