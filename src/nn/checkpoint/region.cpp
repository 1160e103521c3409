#include "region.h"

#include <utility>

#include "tessera/nn/checkpoint.h"

namespace tessera::nn {
namespace detail {
namespace {

thread_local Region* innermost_here = nullptr;

/// The nearest recomputation around this thread's work, from which the regions inside it take what
/// they record.
Region* nearest_replay() {
  Region* region = innermost_here;
  while (region != nullptr && !region->replays()) region = region->outer();
  return region;
}

}  // namespace

Region::Region() : outer_(std::exchange(innermost_here, this)) {}
Region::~Region() {
  innermost_here = outer_;
}
Region* Region::innermost() {
  return innermost_here;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_of_innermost_region() {
  return innermost_here == nullptr ? nullptr : innermost_here->hooks();
}

}  // namespace detail

bool is_recomputing() {
  return detail::nearest_replay() != nullptr;
}

std::uint64_t replayed_count(std::uint64_t& counter) {
  detail::Region* replay = detail::nearest_replay();
  const std::uint64_t count = replay != nullptr ? replay->replay_count() : counter++;
  for (auto* region = detail::Region::innermost(); region != replay; region = region->outer()) {
    region->record_count(count);
  }
  return count;
}

}  // namespace tessera::nn
