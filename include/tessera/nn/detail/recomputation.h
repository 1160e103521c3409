#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Whether this thread is recomputing a part of a forward for backward.
bool is_recomputing();

/// Outside of recomputations, returns counter++. In the recomputation of a checkpointed region,
/// returns the value that the corresponding call in forward returned, and does not change the
/// counter. For modules whose state changes at every call, such as nn::Dropout.
std::uint64_t replayed_count(std::uint64_t& counter);

/// Counters of checkpointed regions, for tests. Several regions may share one object. Thread safe.
struct CheckpointCounts {
  std::atomic<std::int64_t> regions = 0;  ///< number of checkpointed forwards that ran
  /// Number of tensors that forward replaced by placeholders.
  std::atomic<std::int64_t> packed = 0;
  std::atomic<std::int64_t> recomputations = 0;  ///< number of regions that backward ran again
  std::atomic<std::int64_t> repacked = 0;     ///< number of tensors that recomputations made again
  std::atomic<std::int64_t> early_stops = 0;  ///< number of recomputations that stopped early
  // Counters that change only if there is an operator policy:
  /// Number of operator calls in forward whose results were saved.
  std::atomic<std::int64_t> kept_operators = 0;
  /// Number of operator calls in a recomputation that returned saved results.
  std::atomic<std::int64_t> replayed_operators = 0;
  /// Number of operator calls that a recomputation ran again.
  std::atomic<std::int64_t> recomputed_operators = 0;
};

}  // namespace tessera::nn
TESSERA_API_END
