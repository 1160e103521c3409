#pragma once

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// As fake_world(), with the device "meta": tensors there have sizes and no values, so that a step
/// of a model of any size, on any mesh, takes no memory. For planning.
WorldPtr meta_world(int rank, int size);

}  // namespace tessera::comm
TESSERA_API_END
