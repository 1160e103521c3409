#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <span>

#include "tessera/core/placement.h"

namespace tessera::comm {

/// A function that sets `output[i]` to the reduction of `sources[0][i], sources[1][i], ...`. The
/// order of the terms is equal on every rank, so that all ranks that compute the reduction get
/// equal bits. There are at least two sources. 16-bit floats accumulate in fp32. `output` may be
/// one of the sources.
using ReduceFunction = void (*)(std::byte* output, std::span<const std::byte* const> sources,
                                std::size_t elements);

/// The reduction for a type and an operator; nullptr if the operator is not defined for the type.
ReduceFunction find_reduce(c10::ScalarType type, ReduceOp op);

}  // namespace tessera::comm
