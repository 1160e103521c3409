#pragma once

#include <cstdint>

namespace tessera {

/// Where this thread's rank is in its stream of random operators.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t calls = 0;  ///< random operators on distributed tensors since the seed was set
};

/// Seeds the random operators of at:: (uniform_, normal_, dropout, rand_like, multinomial, ...) on
/// distributed tensors, for the rank that this thread is. Ranks that give the same seed and make
/// the same calls get parts of the same global tensors, on every mesh. The common ones draw by the
/// global element, bit-equal on CPU and CUDA and without communication; the others gather and are
/// bit-equal on devices of one kind. A generator that the caller passes is used as it is: every
/// rank must pass an equal one. libtorch's own generators are left alone.
void manual_seed(std::uint64_t seed);

/// For checkpoints and for drawing the same numbers again.
RandomState random_state();
void set_random_state(RandomState state);

}  // namespace tessera
