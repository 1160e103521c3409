#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// A rank's position in the rank's sequence of random operators.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t calls = 0;  ///< number of random operators since the seed was set
};

/// Sets the seed of the random operators of at:: (uniform_, normal_, dropout, rand_like,
/// multinomial, ...) on this thread and on the autograd threads that run its backward. The seed
/// applies to distributed tensors, and to plain tensors in the forward of a module with fully_shard
/// or parallelize_module (docs/random.md). Not collective, but every rank must set the same seed
/// and make the same calls: then the ranks get shards of the same global tensors, on every mesh.
/// The common operators draw by global element, without communication and bit-equal on CPU and
/// CUDA. Operators of other kinds gather their tensors, and are bit-equal on devices of one kind. A
/// generator that the caller passes to an operator has precedence; every rank must pass an equal
/// generator. libtorch's own generators are not changed.
void manual_seed(std::uint64_t seed);

/// This rank's position in its sequence of random operators. set_random_state() with the returned
/// state repeats the numbers drawn after this call.
RandomState random_state();
/// Restores a state that random_state() returned. Later operators repeat the numbers that were
/// drawn after that call.
void set_random_state(RandomState state);

}  // namespace tessera
TESSERA_API_END
