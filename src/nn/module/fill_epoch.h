#pragma once

#include <cstdint>

namespace tessera::nn::detail {

/// A number that changes whenever a slot gets storage that is not filled. A module that was found
/// to be filled stays so until the number changes.
std::uint64_t fill_epoch();

}  // namespace tessera::nn::detail
