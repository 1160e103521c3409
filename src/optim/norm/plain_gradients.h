// Gradients of plain parameters beside those of distributed ones.
#pragma once

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

namespace tessera::optim {

/// Throws Error, on all ranks of `joint`, unless the gradients of plain parameters are equal there:
/// of a module that no unit and no plan has, nobody sums them. Once a module, since it costs a wait
/// for the device, and where `norm`, that of all gradients, is finite: who clips sees to others.
/// Collective then, between the hosts.
void check_plain_gradients(const std::vector<nn::SlotPtr>& parameters, const DeviceMesh& joint,
                           const at::Tensor& norm);

}  // namespace tessera::optim
