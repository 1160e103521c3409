#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// A rank's position in its sequence of random operators.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t calls = 0;  ///< number of random operators since the seed was set
};

/// Seeds this rank's random operators of at:: (uniform_, normal_, dropout, rand_like, multinomial,
/// ...): this thread, and the autograd threads that run its backward. Applies to distributed
/// tensors, and to plain ones in the forward of a module with fully_shard or parallelize_module
/// (docs/random.md). Not collective, but every rank must set the same seed and make the same calls:
/// then they get shards of the same global tensors, on every mesh. The common operators draw by
/// global element, without communication and bit-equal on CPU and CUDA. The others gather, and are
/// bit-equal on devices of one kind. A generator that the caller passes is used instead; every rank
/// must pass an equal one. libtorch's own generators are not changed.
void manual_seed(std::uint64_t seed);

/// This rank's state; set_random_state() with it repeats the same draws.
RandomState random_state();
/// Restores the state from random_state(); later operators repeat the draws that followed it.
void set_random_state(RandomState state);

}  // namespace tessera
TESSERA_API_END
