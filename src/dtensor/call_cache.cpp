#include "call_cache.h"

#include <algorithm>

#include "redistribute.h"

namespace tessera::detail {

void CallCache::make_here() {
  thread_local CallCache cache;
  here_ = &cache;
}

DispatchCacheStatistics CallCache::statistics() const {
  const auto plans =
      std::ranges::count_if(slots_, [](const Slot& slot) { return slot.entry != nullptr; });
  return {static_cast<std::size_t>(plans), kSlots, uses_ - misses_, misses_};
}

void CallCache::clear() {
  slots_ = std::vector<Slot>(kSlots);
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
  ++misses_;
  const auto words = key.words();
  *place = {hash, ++uses_,
            std::make_unique<Entry>(Entry{{words.begin(), words.end()}, std::move(plan)})};
  return place->entry->plan;
}

}  // namespace tessera::detail

namespace tessera {

DispatchCacheStatistics dispatch_cache_statistics() {
  return detail::CallCache::of_thread().statistics();
}

void clear_dispatch_cache() {
  detail::CallCache::of_thread().clear();
  detail::clear_plans();
}

}  // namespace tessera
