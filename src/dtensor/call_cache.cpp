#include "call_cache.h"

#include <algorithm>

namespace tessera::detail {

CallCache& CallCache::of_thread() {
  thread_local CallCache cache;
  return cache;
}

CallPlan* CallCache::find(const CallKey& key, std::uint64_t hash) {
  for (std::size_t i = 0; i < kNeighbourhood; ++i) {
    auto& candidate = slot(hash, i);
    if (!candidate.entry) return nullptr;
    if (candidate.hash == hash && std::ranges::equal(candidate.entry->words, key.words())) {
      candidate.last_use = ++uses_;
      return &candidate.entry->plan;
    }
  }
  return nullptr;
}

CallPlan& CallCache::insert(const CallKey& key, std::uint64_t hash, CallPlan plan) {
  auto* place = &slot(hash, 0);
  for (std::size_t i = 0; i < kNeighbourhood; ++i) {
    auto& candidate = slot(hash, i);
    if (!candidate.entry) {
      place = &candidate;
      break;
    }
    if (candidate.last_use < place->last_use) place = &candidate;
  }
  const auto words = key.words();
  *place = {hash, ++uses_,
            std::make_unique<Entry>(Entry{{words.begin(), words.end()}, std::move(plan)})};
  return place->entry->plan;
}

}  // namespace tessera::detail
