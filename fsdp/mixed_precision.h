#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Casts the floating-point tensors among `tensors` to `dtype`, differentiably; does nothing
/// without a type.
void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype);

/// The type of the first floating-point tensor.
std::optional<c10::ScalarType> floating_type(nn::TensorList tensors);

}  // namespace tessera::fsdp
