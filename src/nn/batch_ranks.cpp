#include "tessera/nn/detail/batch_ranks.h"

namespace tessera::nn {
namespace {

struct BatchRanks {
  std::int64_t ranks = 1;
  bool weighs = false;
};

thread_local BatchRanks of_thread;

}  // namespace

std::int64_t batch_ranks() {
  return of_thread.ranks;
}

void set_batch_ranks(std::int64_t ranks) {
  of_thread.ranks = ranks;
}

bool weighs_ranks() {
  return of_thread.weighs;
}

void note_weighing() {
  of_thread.weighs = true;
}

}  // namespace tessera::nn
