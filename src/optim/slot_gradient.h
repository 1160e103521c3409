#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/nn/parameter.h"

namespace tessera::optim {

/// The gradient of a slot's persistent tensor, undefined if there is none. It lies as the parameter
/// does: one that does not (a pending sum) is redistributed and put back, which is collective.
at::Tensor slot_gradient(const nn::ParameterSlot& slot);

}  // namespace tessera::optim
