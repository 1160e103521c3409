// Counts the memory of tensors, by kind of tensor and phase of a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A block of host memory that a tensor allocates or frees.
struct TensorBlock {
  std::uint64_t number = 0;  ///< number of the allocation in this process, from 1
  std::int64_t bytes = 0;
  bool freed = false;
  const void* data = nullptr;
};

struct TensorMemoryOptions {
  /// Whether to reserve only address space; the system then allocates memory at the first write.
  /// For kernels::FakeMode.
  bool reserve_only = false;
  /// Sizes of blocks are rounded up to a multiple of this many bytes. libtorch uses 512 on a GPU.
  std::int64_t granularity = 1;
  /// A function that is called for each block, on the thread that allocates or frees the block. May
  /// be empty.
  std::function<void(const TensorBlock&)> observer{};
};

/// Starts to count the memory of host tensors, like count_tensor_memory() of memory.h, with
/// options. A second call changes the options. Must not be called while other threads use tensors.
void count_tensor_memory(TensorMemoryOptions options);
/// Bytes of all allocated blocks; nullopt before count_tensor_memory() was called.
std::optional<std::int64_t> tensor_bytes();
/// The highest number of allocated bytes since the last call; nullopt before count_tensor_memory()
/// was called. Thread safe.
std::optional<std::int64_t> take_peak_tensor_bytes();

/// The phase of a run in which a block of memory is allocated.
enum class MemoryPhase : std::uint8_t { kSetup, kForward, kBackward, kUpdate };
/// The name of a phase: "setup", "forward", "backward" or "update". The update is gradient clipping
/// and the optimizer step.
const char* to_string(MemoryPhase phase);

/// The number of MemoryKind values.
inline constexpr std::size_t kMemoryKinds = 7;
/// The name of a kind of memory, for output: "parameters", "gathered parameters".
const char* to_string(MemoryKind kind);
/// Whether FSDP offloading moves memory of this kind to the host: shards, their gradients and the
/// optimizer state.
bool is_state(MemoryKind kind);
/// Bytes, indexed by MemoryKind.
using BytesByKind = std::array<std::int64_t, kMemoryKinds>;

/// The highest memory use in one moment of a step, over all micro-batches. A moment is, for
/// example, the backward of one FSDP unit.
struct MomentMemory {
  std::string name;  ///< the moment's name: "the backward of unit 'model.layers.3'", "the update"
  std::int64_t bytes = 0;
  BytesByKind live{};  ///< bytes in use of each kind, with host memory (not in `bytes`)
};

/// A rank's memory in one step.
struct StepMemory {
  BytesByKind most{};  ///< the maximum bytes of each kind during the step
  std::int64_t peak_bytes = 0;
  BytesByKind at_peak{};
  std::string peak_moment;  ///< the moment of the peak: "the backward of unit 'model.layers.3'"
  /// The moments of the step, in the order in which the moments reach their maximum; empty unless
  /// requested.
  std::vector<MomentMemory> moments;
};

}  // namespace tessera::observe
TESSERA_API_END
