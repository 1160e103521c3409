#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::observe {

/// FLOP/s of a device, found by products of square matrices in `type`: what MFU is against where
/// no data sheet is, and on a CPU. The median of several windows, in which all ranks compute, so
/// that those of one host share its cores as they do in training; the mean over the ranks. Takes
/// about a second, and draws no random numbers. Collective over `world`, and the same on all ranks.
double measure_peak_flops(comm::World& world, c10::ScalarType type);

}  // namespace tessera::observe
TESSERA_API_END
