#pragma once

#include <cstdint>

#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Rows of a fused parameter that are initialized as if the rows were a parameter of their own.
struct RandomPart {
  std::uint64_t stream = 0;  ///< random stream of the separate parameter
  PartRows rows;
};

/// The state of a rank's random operators: the return type of random_state().
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t calls = 0;  ///< number of random operator calls since the seed was set
};

/// Returns the random stream for a name, such as an FQN; equal in every process (FNV-1a).
std::uint64_t stream_of(const char* name);

/// Derives a random stream from `stream` and `index`. For example, each call of an operator has its
/// own `index`, and so its own random numbers.
std::uint64_t substream(std::uint64_t stream, std::uint64_t index);

}  // namespace tessera
TESSERA_API_END
