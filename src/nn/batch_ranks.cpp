#include "tessera/nn/detail/batch_ranks.h"

#include <cstdint>

namespace tessera::nn {
namespace {

thread_local std::int64_t batch_ranks_of_thread = 1;
thread_local bool weighs_on_thread = false;

}  // namespace

std::int64_t batch_ranks() {
  return batch_ranks_of_thread;
}

void set_batch_ranks(std::int64_t ranks) {
  batch_ranks_of_thread = ranks;
}

bool weighs_ranks() {
  return weighs_on_thread;
}

void note_weighing() {
  weighs_on_thread = true;
}

}  // namespace tessera::nn
