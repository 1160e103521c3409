// The memory of tensors, by kind and phase.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/memory.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A block of host memory that a tensor allocates or frees.
struct TensorBlock {
  std::uint64_t number = 0;  ///< number of the allocation in this process, from 1
  std::int64_t bytes = 0;
  bool freed = false;
  const void* data = nullptr;
};

/// Options of count_tensor_memory().
struct TensorMemoryOptions {
  /// Whether to reserve only address space; the system then allocates memory at the first write.
  /// For FakeMode.
  bool reserve_only = false;
  /// Sizes are rounded up to a multiple of this many bytes. libtorch uses 512 on a GPU.
  std::int64_t granularity = 1;
  /// Called for each block, on the thread that allocates or frees it. May be empty.
  std::function<void(const TensorBlock&)> observer{};
};

/// count_tensor_memory() of memory.h with options. A second call changes the options. Must not be
/// called while other threads use tensors.
void count_tensor_memory(TensorMemoryOptions options);
/// Bytes of all allocated blocks; nullopt if nothing is counted.
std::optional<std::int64_t> tensor_bytes();
/// The highest number of allocated bytes since the last call; nullopt if nothing is counted. Thread
/// safe.
std::optional<std::int64_t> take_peak_tensor_bytes();

/// The phases of a run that memory is attributed to.
enum class MemoryPhase : std::uint8_t { kSetup, kForward, kBackward, kUpdate };
/// "setup", "forward", "backward" or "update". The update is gradient clipping and the optimizer
/// step.
const char* to_string(MemoryPhase phase);

/// The number of MemoryKind values.
inline constexpr std::size_t kMemoryKinds = 7;
/// A name for output: "parameters", "gathered parameters".
const char* to_string(MemoryKind kind);
/// Whether FSDP offloading moves memory of this kind to the host: shards, their gradients and the
/// optimizer state.
bool is_state(MemoryKind kind);
/// Bytes, indexed by MemoryKind.
using BytesByKind = std::array<std::int64_t, kMemoryKinds>;

/// The highest memory use while one FSDP unit was active, over all micro-batches.
struct MomentMemory {
  std::string name;  ///< the moment's name: "the backward of unit 'model.layers.3'", "the update"
  std::int64_t bytes = 0;
  BytesByKind live{};  ///< live bytes of each kind, including host memory, which `bytes` excludes
};

/// A rank's memory in one step.
struct StepMemory {
  BytesByKind most{};  ///< the maximum bytes of each kind during the step
  std::int64_t peak_bytes = 0;
  BytesByKind at_peak{};
  std::string peak_moment;  ///< the moment of the peak: "the backward of unit 'model.layers.3'"
  /// Moments in the order in which they reach their maximum; empty unless requested.
  std::vector<MomentMemory> moments;
};

}  // namespace tessera::observe
TESSERA_API_END
