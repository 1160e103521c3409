#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Marks a tensor that `by` ("fully_shard") has replaced in its slot. A stock torch::optim
/// optimizer that was made earlier still holds it, and would update values that are not used. So
/// its gradient becomes a tensor that every operator refuses: step() and zero_grad() of such an
/// optimizer throw Error with the reason. The values can still be read. libtorch's hooks of
/// `replaced` (register_hook, post-accumulate) become those of `replacement`, the leaf that is in
/// the slot now.
void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by);

}  // namespace tessera::nn
TESSERA_API_END
