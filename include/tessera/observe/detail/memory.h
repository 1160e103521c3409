// Counts the memory of tensors, by kind of tensor and phase of a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/comm/detail/streams.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/observe/metrics.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// A block of CPU memory that a tensor allocates or frees.
struct TensorBlock {
  std::uint64_t number = 0;  ///< serial number of the allocation in this process, from 1
  std::int64_t bytes = 0;
  bool freed = false;
  const void* data = nullptr;
};

/// Options of count_tensor_memory().
struct TensorMemoryOptions {
  /// Whether to reserve only virtual addresses: the system allocates memory at the first write.
  /// Used with kernels::FakeMode.
  bool reserve_only = false;
  /// Sizes of memory blocks are rounded up to a multiple of `granularity` bytes. libtorch uses 512
  /// on a GPU.
  std::int64_t granularity = 1;
  /// A function that is called for each block, on the thread that allocates or frees the block. May
  /// be empty.
  std::function<void(const TensorBlock&)> observer{};
};

/// Like count_tensor_memory() of metrics.h, but with options. A second call changes the options.
/// Must not be called while other threads use tensors.
void count_tensor_memory(TensorMemoryOptions options);
/// Returns the number of bytes in all allocated blocks of memory; nullopt before
/// count_tensor_memory() was called.
std::optional<std::int64_t> tensor_bytes();
/// Returns the highest number of allocated bytes since the last call; nullopt before
/// count_tensor_memory() was called. Thread safe.
std::optional<std::int64_t> take_peak_tensor_bytes();

/// The phase of a run in which a block of memory is allocated.
enum class MemoryPhase : std::uint8_t { kSetup, kForward, kBackward, kUpdate };
/// Returns the name of a phase: "setup", "forward", "backward" or "update". The update is gradient
/// clipping and the optimizer step.
const char* to_string(MemoryPhase phase);

/// What a block of memory is used for, derived from when and where the block was allocated and
/// freed.
enum class MemoryKind : std::uint8_t {
  kParameters,   ///< memory allocated in setup: this rank's shards, and buffers
  kOptimizer,    ///< memory allocated in the first update and not freed
  kGradients,    ///< gradients: memory that outlives the backward that allocated it
  kGathered,     ///< all-gather buffers and gathered parameters
  kReduced,      ///< buffers for reducing gradients
  kActivations,  ///< memory that a forward allocates for backward; cached masks
  kTemporary,    ///< all other memory of tensors
};

/// The number of MemoryKind values.
inline constexpr std::size_t kMemoryKinds = 7;
/// Returns the name of a kind of memory, for output: "parameters", "gathered parameters".
const char* to_string(MemoryKind kind);
/// Whether FSDP offloading moves memory of this kind to CPU memory: shards, their gradients and the
/// optimizer state.
bool is_state(MemoryKind kind);
/// Numbers of bytes, indexed by MemoryKind.
using BytesByKind = std::array<std::int64_t, kMemoryKinds>;

/// The highest memory use in a moment, over all micro-batches. A moment is a named section of a
/// step, for example the backward of an FSDP unit.
struct MomentMemory {
  std::string name;  ///< the moment's name: "the backward of unit 'model.layers.3'", "the update"
  std::int64_t bytes = 0;
  BytesByKind live{};  ///< bytes of each kind of memory, also of offloaded tensors
};

/// A rank's memory in one step.
struct StepMemory {
  BytesByKind most{};  ///< for each kind of memory, the maximum number of bytes in the step
  std::int64_t peak_bytes = 0;
  BytesByKind at_peak{};
  std::string peak_moment;  ///< the moment of the peak: "the backward of unit 'model.layers.3'"
  /// The moments of the step, in the order of the times of their memory peaks; empty unless
  /// begin_step() requests moments.
  std::vector<MomentMemory> moments;
};

/// Records the memory of CPU tensors in a process with a single rank. At most one MemoryLog may
/// exist. Create the MemoryLog on the thread that runs the steps, before the model and the streams
/// of FSDP.
class MemoryLog final : tessera::detail::NoCopy {
 public:
  /// Counts tensor memory with `options`. The observer in `options` is not used.
  explicit MemoryLog(TensorMemoryOptions options);
  ~MemoryLog();

  /// Begins to record a step and discards earlier records. Each allocation calls `where` for the
  /// name of the current moment; "" stands for the MemoryPhase. `moments`: whether to fill
  /// StepMemory::moments.
  void begin_step(std::function<std::string()> where, bool moments = false);
  /// Returns the phase of the run (MemoryPhase) at the last allocation.
  MemoryPhase phase() const { return phase_; }
  /// Returns a wrapper of `lanes`, FSDP's simulated streams, for comm::set_host_streams(). The
  /// wrapper tells the MemoryLog the stream of each allocation. The MemoryLog must outlive the
  /// wrapper.
  comm::StreamsPtr memory_lanes(comm::StreamsPtr lanes);
  /// Marks a CPU tensor as a parameter, in the counts by MemoryKind. Call assign_parameter() for
  /// all parameters.
  void assign_parameter(const at::Tensor& tensor);

  /// Returns the memory use of the last step, after its end. `on_host`: whether FSDP offloads
  /// shards, gradients and optimizer state, so that their memory does not count towards the peak.
  StepMemory use(bool on_host) const;

 private:
  class Lanes;
  struct Block {
    const void* data = nullptr;
    std::int64_t bytes = 0;
    MemoryPhase born = MemoryPhase::kSetup;
    comm::Lane lane = comm::Lane::kCompute;
    bool is_parameter = false;
    int began = 0, ended = 0;
    bool earlier = false;
  };
  struct Event {
    std::uint64_t number;
    bool freed;
    std::size_t moment;
  };

  void note(const TensorBlock& block);
  void update_moment();
  void update_phase();
  static MemoryKind kind_of(const Block& block);

  mutable std::mutex mutex_;
  bool reserve_only_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::unordered_map<std::uint64_t, Block> blocks_;
  std::map<const void*, std::uint64_t> live_blocks_;
  std::vector<Event> events_;
  MemoryPhase phase_ = MemoryPhase::kSetup;
  int phases_ = 0;
  comm::Lane lane_ = comm::Lane::kCompute;
  std::function<std::string()> where_;
  bool returns_moments_ = false;
  std::vector<std::string> moments_{""};
  std::size_t moment_ = 0;
};

}  // namespace tessera::observe
TESSERA_API_END
