#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The calls of a module around which a hook runs.
enum class HookedCalls : std::uint8_t {
  kForward,
  kEveryMethod,  ///< the hook runs around forward, and around other methods that
                 ///< Module::call_method calls
};

}  // namespace tessera::nn
TESSERA_API_END
