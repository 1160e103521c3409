#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::nn {

/// Marks a tensor that `by` ("fully_shard") has replaced in its slot. Whoever still holds it as a
/// parameter, as a stock torch::optim optimizer made earlier does, would update values that nobody
/// reads: from now on its gradient is a tensor that no operator takes, so that step() and
/// zero_grad() of such an optimizer throw Error with the reason. Reading its values is allowed.
void retire_parameter(const at::Tensor& replaced, const std::string& by);

}  // namespace tessera::nn
