// For those who write operators and rules.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// How check_rule compares.
struct CheckRuleOptions {
  int ranks = 3;       ///< on a 1-D mesh; sizes that it does not divide show more
  double rtol = 1e-5;  ///< as at::allclose
  double atol = 1e-8;  ///< as at::allclose
};

/// Compares the results of operator `op` ("mylib::scale", with its overload if it has one) for
/// distributed arguments with those for `arguments`, which are plain and in the order of the
/// schema, defaults included: for each combination of placements of its tensors, sharded or
/// pending, that its rule takes without redistributing. Results and written arguments are compared.
/// Returns how many combinations those are; of arguments that are all replicated there is one. For
/// tests of a rule of your own (register_rule): one that is wrong gives wrong numbers and no error.
///
/// Runs on a mesh of threads that it starts: not collective, and no job is needed. Not for
/// operators that draw random numbers. Throws Error, with the placements, at the first combination
/// whose values differ or that throws.
int check_rule(std::string_view op, const std::vector<c10::IValue>& arguments,
               const CheckRuleOptions& options = {});

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
