#pragma once

#include <functional>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {

/// What `make` returns. If checks_agreement(), a rank on which it throws still takes part in the
/// comparison, so that all ranks of the mesh throw. `make` must not communicate.
DistributedTensor make_agreed(const DeviceMesh& mesh,
                              const std::function<DistributedTensor()>& make);

}  // namespace tessera::detail
