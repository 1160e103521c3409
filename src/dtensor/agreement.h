#pragma once

#include <functional>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {

/// Whether a flag is set on one rank of the mesh at least. Collective over all of it.
bool any_rank(const DeviceMesh& mesh, bool own);

/// Whether ranks compare what they make: as TESSERA_DEBUG says, else in builds without NDEBUG.
bool checks_agreement();

/// What `make` returns. If checks_agreement(), a rank on which it throws still takes part in the
/// comparison, so that all ranks of the mesh throw. `make` must not communicate.
DistributedTensor make_agreed(const DeviceMesh& mesh,
                              const std::function<DistributedTensor()>& make);

}  // namespace tessera::detail
