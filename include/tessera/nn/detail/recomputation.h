#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Whether this thread is recomputing a part of a forward for backward.
bool is_recomputing();

/// Returns counter++. In a recomputation of a checkpointed region, replayed_count() returns the
/// value of the corresponding call in forward, and does not change the counter. For modules whose
/// state changes at every call, such as nn::Dropout.
std::uint64_t replayed_count(std::uint64_t& counter);

}  // namespace tessera::nn
TESSERA_API_END
