#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// A number that changes whenever some slot gets storage that nobody has filled. A module that was
/// found to be filled stays so until then.
std::uint64_t fill_epoch();

}  // namespace tessera::nn::detail
TESSERA_API_END
