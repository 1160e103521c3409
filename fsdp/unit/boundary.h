#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <unordered_set>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

// The tensors that enter a unit's forward and leave it. The unit computes on its device, in the
// type of its policy. A tensor that already fits stays the same object. Tensors without values
// (meta) and distributed tensors, whose mesh has a device, are not moved.

/// Moves the arguments of a forward, differentiably.
void move_inputs(nn::TensorList inputs, c10::Device device);

/// Moves the buffers of `modules` and below them, but for those of units and those in `ignored`.
/// Who holds a buffer (nn::Parameter, a tensor that libtorch's register_buffer returned) sees it
/// moved.
void move_buffers(const std::vector<nn::ModuleBase*>& modules, c10::Device device,
                  const std::unordered_set<nn::SlotPtr>& ignored);

/// Casts the floating-point tensors among `tensors` to `dtype`, differentiably; does nothing
/// without a type.
void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype);

/// The type of the first floating-point tensor.
std::optional<c10::ScalarType> floating_type(nn::TensorList tensors);

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
