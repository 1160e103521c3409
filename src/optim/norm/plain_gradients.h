// Gradients of plain parameters beside those of distributed ones.
#pragma once

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

namespace tessera::optim {

/// Throws Error, on all ranks of `joint`, unless the gradients of plain parameters are equal there:
/// they are not summed for a module in no unit and no plan. Runs once a module, since it waits for
/// the device, and only if `norm`, that of all gradients, is finite: other values are the caller's
/// to handle. Collective then, between the hosts.
void check_plain_gradients(const std::vector<nn::SlotPtr>& parameters, const DeviceMesh& joint,
                           const at::Tensor& norm);

}  // namespace tessera::optim
