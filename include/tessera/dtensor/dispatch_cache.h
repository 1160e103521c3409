#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// The plans of operators' calls that this thread keeps, by operator, layouts, sizes and the
/// numbers that rules read. Bounded: a new plan then drops one that was not used lately.
struct DispatchCacheStatistics {
  std::size_t plans = 0;
  std::size_t capacity = 0;
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
};
DispatchCacheStatistics dispatch_cache_statistics();

/// Drops this thread's plans, and with them the meshes that they hold. Not from within an operator.
void clear_dispatch_cache();

}  // namespace tessera
