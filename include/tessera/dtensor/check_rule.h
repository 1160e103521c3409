// Tests of sharding rules, and statistics of the dispatch cache, for authors of operators and
// sharding rules.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Tests a sharding rule (register_rule), because a wrong rule gives wrong numbers without an
/// error. First runs operator `op` ("mylib::scale", plus an overload name) on the plain
/// `arguments`: all arguments of the schema, in order. Then runs the operator on distributed
/// arguments, in each combination of sharded or partial placements that the rule accepts without
/// redistribution. Compares results and written arguments, as at::allclose does by default. Returns
/// the number of combinations.
///
/// Starts threads as the `ranks` ranks of a 1-D mesh, so it is not collective and needs no
/// distributed job. Sizes of tensors that `ranks` does not divide test more cases. Not for random
/// operators. Throws Error, with the placements, at the first combination that differs or throws.
int check_rule(std::string_view op, const std::vector<c10::IValue>& arguments, int ranks = 3);

/// Statistics of the dispatch cache, which stores how operator calls are run (their plans), by
/// operator, layouts, sizes and the numbers that rules read. Every thread has a cache, including
/// autograd's threads. The size is bounded: in a full cache a new plan replaces an old plan that
/// was not used recently.
struct DispatchCacheStatistics {
  std::size_t plans = 0;     ///< number of plans that are in the cache now
  std::size_t capacity = 0;  ///< maximum number of plans in the cache
  /// Number of calls that found their plan in the cache, since the threads started.
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;  ///< number of calls that had to make a plan
};
/// Returns the sums over the dispatch caches of this thread and of the threads that run its
/// backwards. Must not be called while a backward runs.
DispatchCacheStatistics dispatch_cache_statistics();

}  // namespace tessera
TESSERA_API_END
