// Sums, averages, products, maxima and minima over the slots of the ranks, for the types that
// training uses. Plain loops over blocks that stay in cache, which compilers vectorize.

#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <span>

#include "tessera/core/placement.h"

namespace tessera::comm {

/// `output[i]` = the reduction of `sources[0][i], sources[1][i], ...`, in that order on every rank,
/// so that all ranks that compute it get the same bits. There are two sources or more. 16-bit
/// floats accumulate in fp32. `output` may be one of the sources.
using ReduceFunction = void (*)(std::byte* output, std::span<const std::byte* const> sources,
                                std::size_t elements);

/// nullptr: no such reduction of this type.
ReduceFunction find_reduce(c10::ScalarType type, ReduceOp op);

}  // namespace tessera::comm
