#include "seeded_generator.h"

#include <ATen/Context.h>

#include "tessera/dtensor/manual_seed.h"

namespace tessera {
namespace {

thread_local RandomState state_here;

std::mutex& turns() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

void manual_seed(std::uint64_t seed) {
  state_here = {seed, 0};
}
RandomState random_state() {
  return state_here;
}
void set_random_state(RandomState state) {
  state_here = state;
}

namespace detail {

RandomKey next_random_key() {
  return {state_here.seed, substream(stream_of("at::"), state_here.calls++)};
}

SeededGenerator::SeededGenerator(c10::Device device, RandomKey key)
    : turn_(turns()),
      generator_(at::globalContext().defaultGenerator(device)),
      outer_(generator_.get_state()) {
  std::lock_guard lock(generator_.mutex());
  generator_.set_current_seed(key.seed ^ key.stream);
}

SeededGenerator::~SeededGenerator() {
  generator_.set_state(outer_);
}

}  // namespace detail
}  // namespace tessera
