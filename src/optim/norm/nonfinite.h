// Whose gradients are not finite: for the message of a step that has failed.
#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

namespace tessera::optim {

/// See describe_nonfinite(). Collective over `joint`; of this rank alone if that is empty.
std::string nonfinite_text(const DeviceMesh& joint, const std::vector<nn::SlotPtr>& parameters);

}  // namespace tessera::optim
