#pragma once

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// As fake_world(), with the device "meta", whose tensors have sizes and no values. A step takes no
/// memory there, however large model and mesh are. For planning.
WorldPtr meta_world(int rank, int size);

}  // namespace tessera::comm
TESSERA_API_END
