#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// Starts to count the memory of host tensors in the whole process, so that metrics include the
/// peak of this memory. Earlier allocations are not counted. Must not be called while other threads
/// use tensors.
void count_tensor_memory();

/// The purpose of a block of memory, derived from when and where the block was allocated and freed.
enum class MemoryKind : std::uint8_t {
  kParameters,   ///< allocated in setup: this rank's shards, and buffers
  kOptimizer,    ///< allocated in the first update and not freed
  kGradients,    ///< allocated in a backward and used after it
  kGathered,     ///< all-gather buffers and gathered parameters
  kReduced,      ///< buffers for reducing gradients
  kActivations,  ///< allocated in a forward and used later, also in later steps (masks)
  kTemporary,    ///< memory of none of the other kinds
};

}  // namespace tessera::observe
TESSERA_API_END
