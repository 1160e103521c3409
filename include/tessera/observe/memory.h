#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A block of host memory that a tensor allocates or frees.
struct TensorBlock {
  std::uint64_t number = 0;  ///< of the allocation in this process, from 1
  std::int64_t bytes = 0;
  bool freed = false;
  const void* data = nullptr;
};

/// How tensors' memory is counted.
struct TensorMemoryOptions {
  /// Reserve addresses only; memory is allocated at the first write. For FakeMode.
  bool reserve_only = false;
  /// Sizes are rounded up to a multiple of this many bytes; 512 as by libtorch on a GPU.
  std::int64_t granularity = 1;
  /// Called for each block, on the thread that allocates or frees it; may be empty.
  std::function<void(const TensorBlock&)> observer{};
};

/// Starts to count the memory of tensors on the host, of the whole process, without earlier
/// allocations. A later call changes the options. Do not call it while other threads use tensors.
void count_tensor_memory(TensorMemoryOptions options = {});
/// Bytes of the allocated blocks; nullopt if nothing is counted.
std::optional<std::int64_t> tensor_bytes();
/// The most since the last call; nullopt if nothing is counted. Thread safe.
std::optional<std::int64_t> take_peak_tensor_bytes();

/// The parts of a run, as memory sees them.
enum class MemoryPhase : std::uint8_t { kSetup, kForward, kBackward, kUpdate };
/// "setup", "forward", "backward", or "update": clipping and the optimizer.
const char* to_string(MemoryPhase phase);

/// What a block of memory is for, derived from when and where it was allocated and freed.
enum class MemoryKind : std::uint8_t {
  kParameters,   ///< made by the setup: this rank's shards, and buffers
  kOptimizer,    ///< made by the first update, and not freed
  kGradients,    ///< made by a backward, used after it
  kGathered,     ///< made to gather parameters
  kReduced,      ///< made to reduce gradients
  kActivations,  ///< made by a forward, used after it, in later steps as well (masks)
  kTemporary,    ///< the rest
};
/// How many there are.
inline constexpr std::size_t kMemoryKinds = 7;
/// "parameters", "gathered parameters".
const char* to_string(MemoryKind kind);
/// Whether offloading moves it to the host: shards, their gradients, the optimizer's state.
bool is_state(MemoryKind kind);
/// Bytes by MemoryKind.
using BytesByKind = std::array<std::int64_t, kMemoryKinds>;

/// The highest use while one FSDP unit was active, of all micro-batches.
struct MomentMemory {
  std::string name;  ///< "the backward of unit 'model.layers.3'", "the update"
  std::int64_t bytes = 0;
  BytesByKind live{};  ///< also in the host's memory, which `bytes` does not count
};

/// A rank's memory in a step.
struct StepMemory {
  BytesByKind most{};  ///< each kind's largest
  std::int64_t peak_bytes = 0;
  BytesByKind at_peak{};
  std::string peak_moment;  ///< "the backward of unit 'model.layers.3'"
  /// In the order in which they are at their highest; empty unless requested.
  std::vector<MomentMemory> moments;
};

}  // namespace tessera::observe
TESSERA_API_END
