#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/observe/detail/memory.h"
#include "tessera/observe/metrics.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// Records the memory of host tensors in this single-rank process, from its construction on. Only
/// one may exist at a time. Create it on the thread that runs the steps, before the streams of the
/// model's FSDP units (memory_lanes) and before the model.
class MemoryLog final {
 public:
  /// Counts tensor memory with `options`. The observer in `options` is not used.
  explicit MemoryLog(TensorMemoryOptions options);
  ~MemoryLog();
  MemoryLog(const MemoryLog&) = delete;
  MemoryLog& operator=(const MemoryLog&) = delete;

  /// Begins a step: the first step, or the step to examine. `where` is called at each allocation
  /// and returns the name of the current moment, or "" if the moment has no name other than its
  /// phase. Without `moments`, StepMemory::moments stays empty.
  void begin_step(std::function<std::string()> where, bool moments = false);
  /// The phase of the last allocation.
  MemoryPhase phase() const { return phase_; }
  /// Returns streams that forward to `lanes`, and that tell the log in which lane (Lane in
  /// comm/streams.h) a block is allocated. Pass the result to comm::set_host_streams. The log must
  /// outlive the result.
  comm::StreamsPtr memory_lanes(comm::StreamsPtr lanes);
  /// Marks the memory of a CPU tensor as the memory of a parameter. Call assign_parameter() for all
  /// parameters.
  void assign_parameter(const at::Tensor& tensor);

  /// The memory of the step that began last, which must have ended. With `on_host`, shards,
  /// gradients and optimizer state are in host memory and do not count towards the peak.
  StepMemory use(bool on_host) const;

 private:
  class Lanes;
  struct Block {
    const void* data = nullptr;
    std::int64_t bytes = 0;
    MemoryPhase born = MemoryPhase::kSetup;
    comm::Lane lane = comm::Lane::kCompute;
    bool is_parameter = false;
    /// Indices of the phases in which the block was allocated and freed. `ended` is the highest
    /// index for a block that is not freed.
    int began = 0, ended = 0;
    bool earlier = false;  ///< whether the block was allocated before the step
  };
  struct Event {
    std::uint64_t number;
    bool freed;
    std::size_t moment;  ///< index into moments_
  };

  void note(const TensorBlock& block);
  void update_moment();
  void update_phase();
  static MemoryKind kind_of(const Block& block);

  mutable std::mutex mutex_;
  bool reserve_only_;
  std::thread::id thread_ = std::this_thread::get_id();  ///< the thread that runs the steps
  std::unordered_map<std::uint64_t, Block> blocks_;
  /// Allocation number of each block in use, by address.
  std::map<const void*, std::uint64_t> live_blocks_;
  std::vector<Event> events_;  ///< allocations and frees of the step
  MemoryPhase phase_ = MemoryPhase::kSetup;
  int phases_ = 0;
  comm::Lane lane_ = comm::Lane::kCompute;
  std::function<std::string()> where_;
  bool returns_moments_ = false;
  std::vector<std::string> moments_{""};  ///< names of the moments of the step
  std::size_t moment_ = 0;                ///< index of the moment of the last allocation
};

}  // namespace tessera::observe
TESSERA_API_END
