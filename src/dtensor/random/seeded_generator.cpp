// The sequence of random operators of a rank, and libtorch's generator for those that run whole.
// Every rank counts its own calls; that all make the same is what manual_seed asks of the program.

#include "random/seeded_generator.h"

#include <ATen/Context.h>

#include "rank/rank_state.h"
#include "tessera/dtensor/manual_seed.h"

namespace tessera {
namespace {

/// The default generators belong to the process, and ranks may be its threads. Held for one
/// operator on local tensors, which waits for no other rank.
std::mutex& turns() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

void manual_seed(std::uint64_t seed) {
  set_random_state({seed, 0});
}
RandomState random_state() {
  const auto rank = detail::RankState::here();
  const std::lock_guard lock(rank->mutex);
  return rank->random;
}
void set_random_state(RandomState state) {
  const auto rank = detail::RankState::here();
  const std::lock_guard lock(rank->mutex);
  rank->random = state;
}

namespace detail {

RandomKey next_random_key() {
  // A separate stream: a program's streams are named for its parameters.
  const auto rank = RankState::here();
  const std::lock_guard lock(rank->mutex);
  return {rank->random.seed, substream(stream_of("at::"), rank->random.calls++)};
}

SeededGenerator::SeededGenerator(c10::Device device, RandomKey key)
    : turn_(turns()),
      generator_(at::globalContext().defaultGenerator(device)),
      outer_(generator_.get_state()) {
  // The generator's own lock, since libtorch draws from it elsewhere in the process. One number is
  // all the seed that it takes.
  std::lock_guard lock(generator_.mutex());
  generator_.set_current_seed(key.seed ^ key.stream);
}

SeededGenerator::~SeededGenerator() {
  // The program's own draws from libtorch's generator do not depend on this seed.
  generator_.set_state(outer_);
}

}  // namespace detail
}  // namespace tessera
