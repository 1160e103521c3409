#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The position of a rank in its sequence of random operators.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t calls = 0;  ///< random operators since the seed was set
};

/// Seeds the random operators of at:: (uniform_, normal_, dropout, rand_like, multinomial, ...) on
/// distributed tensors, and on plain ones in the forward of a module that fully_shard or
/// parallelize_module was applied to (docs/random.md), for this rank: this thread, and the threads
/// of autograd that run its backward. Not collective, but every rank must give the same seed and
/// make the same calls: then they get shards of the same global tensors, on every mesh. The common
/// operators draw by global element, without communication and bit-equal on CPU and CUDA; the
/// others gather, and are bit-equal on devices of one kind. A generator that the caller passes is
/// used unchanged; every rank must pass an equal one. libtorch's own generators are not changed.
void manual_seed(std::uint64_t seed);

/// The state of this rank, to save it and to draw the same numbers again.
RandomState random_state();
/// Restores the state from random_state(); later operators repeat the draws that followed it.
void set_random_state(RandomState state);

}  // namespace tessera
TESSERA_API_END
