#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The dispatch cache keeps the plans of operator calls, by operator, layouts, sizes and the
/// numbers that rules read. Every thread has its own, a thread of autograd too. It is bounded: when
/// it is full, a new plan replaces one that was not used lately.
struct DispatchCacheStatistics {
  std::size_t plans = 0;     ///< in the cache now
  std::size_t capacity = 0;  ///< at most so many
  std::uint64_t hits = 0;    ///< calls that found their plan, since the threads began
  std::uint64_t misses = 0;  ///< calls that made one
};
/// The counts of this thread's cache and of those of the threads that run its backwards, together.
/// Not to be called while a backward runs.
DispatchCacheStatistics dispatch_cache_statistics();

/// Empties this thread's cache, and releases the meshes that its plans hold. Must not be called
/// from within an operator.
void clear_dispatch_cache();

}  // namespace tessera
TESSERA_API_END
