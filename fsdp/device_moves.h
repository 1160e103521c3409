#pragma once

#include <c10/core/Device.h>

#include <unordered_set>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::fsdp {

// What a unit computes with is where it computes. A tensor that is there stays the same object;
// what has no values yet (meta) and distributed tensors, which have a device of their own, stay
// where they are.

/// Moves the arguments of a forward, differentiably.
void move_inputs(nn::TensorList inputs, c10::Device device);

/// Moves the buffers of `modules` and below them, but for those of units and those in `ignored`.
/// Who holds a buffer (nn::Parameter, a tensor that libtorch's register_buffer returned) sees it
/// moved.
void move_buffers(const std::vector<nn::ModuleBase*>& modules, c10::Device device,
                  const std::unordered_set<nn::SlotPtr>& ignored);

}  // namespace tessera::fsdp
