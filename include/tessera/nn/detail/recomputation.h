#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Whether this thread is recomputing a part of a forward for backward.
bool is_recomputing();

/// Outside of recomputations, returns counter++. In the recomputation of a checkpointed region,
/// returns the value that the corresponding call in forward returned, and does not change the
/// counter. For modules whose state changes at every call, such as nn::Dropout.
std::uint64_t replayed_count(std::uint64_t& counter);

}  // namespace tessera::nn
TESSERA_API_END
