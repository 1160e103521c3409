#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Counters of checkpointed regions, for tests. Several regions may share one object. Thread safe.
struct CheckpointCounts {
  std::atomic<std::int64_t> regions = 0;         ///< checkpointed forwards that ran
  std::atomic<std::int64_t> packed = 0;          ///< tensors that forward replaced by placeholders
  std::atomic<std::int64_t> recomputations = 0;  ///< regions that backward ran again
  std::atomic<std::int64_t> repacked = 0;        ///< tensors that recomputations made again
  std::atomic<std::int64_t> early_stops = 0;     ///< recomputations that stopped early
  // Counters that only an operator policy changes:
  std::atomic<std::int64_t> kept_operators = 0;      ///< calls in forward whose results were saved
  std::atomic<std::int64_t> replayed_operators = 0;  ///< calls in a recomputation that returned
                                                     ///< saved results
  std::atomic<std::int64_t> recomputed_operators = 0;  ///< calls that a recomputation ran again
};

}  // namespace tessera::nn
TESSERA_API_END
