#pragma once

#include <cstdint>

namespace tessera::data {

using TokenId = std::uint32_t;

}  // namespace tessera::data
