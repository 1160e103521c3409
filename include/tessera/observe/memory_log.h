#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/observe/module_watch.h"
#include "tessera/observe/tensor_memory.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// The parts of a run, as memory sees them.
enum class MemoryPhase : std::uint8_t { kSetup, kForward, kBackward, kUpdate };
/// "setup", "forward", "backward", or "update": clipping and the optimizer.
const char* to_string(MemoryPhase phase);

/// What a block of memory is for, told from when and where it came and went.
enum class MemoryKind : std::uint8_t {
  kParameters,   ///< made by the setup: this rank's shards, and buffers
  kOptimizer,    ///< made by the first update, kept
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

/// What a unit's tensors take.
struct UnitMemory {
  BytesByKind most{};     ///< each kind's largest
  BytesByKind at_peak{};  ///< when all tensors together take the most
};

/// The highest use while one unit was under way, of all micro-batches.
struct MomentMemory {
  std::string name;  ///< "the backward of unit 'model.layers.3'", "the update"
  std::int64_t bytes = 0;
  BytesByKind live{};  ///< with what is in the host's memory, which `bytes` has not
};

/// A rank's memory in a step.
struct StepMemory {
  BytesByKind most{};  ///< each kind's largest
  std::int64_t peak_bytes = 0;
  BytesByKind at_peak{};
  std::string peak_moment;                  ///< "the backward of unit 'model.layers.3'"
  std::map<std::string, UnitMemory> units;  ///< "": what belongs to none
  /// In the order in which they are at their highest; empty unless asked for.
  std::vector<MomentMemory> moments;
};

/// Follows the tensors on the host of the one rank of this process, from its making on. One at a
/// time; made on the thread that makes the steps, before the lanes of the model's units
/// (memory_lanes) and the model.
class MemoryLog final : public ActivityListener {
 public:
  /// The observer in `options` is replaced.
  explicit MemoryLog(TensorMemoryOptions options);
  ~MemoryLog() override;
  MemoryLog(const MemoryLog&) = delete;
  MemoryLog& operator=(const MemoryLog&) = delete;

  /// A step begins: the first one, or the one to examine. `where` returns the moment of a peak.
  /// With `moments` it is called at each allocation, for StepMemory::moments.
  void begin_step(std::function<std::string()> where, bool moments = false);
  /// That of the last allocation.
  MemoryPhase phase() const { return phase_; }
  /// Lanes whose memory the log can distinguish: to be passed to comm::set_host_streams. They
  /// forward to `lanes`. The log must outlive them.
  comm::StreamsPtr memory_lanes(comm::StreamsPtr lanes);
  /// The memory of this tensor of a CPU belongs to the module of this FQN; "": to none. Other
  /// tensors may share its block. To be called for all parameters.
  void assign(const at::Tensor& tensor, const std::string& module);
  /// As assign() of a tensor of the optimizer's state, which a load may have made before any step.
  void assign_state(const at::Tensor& tensor, const std::string& module);

  /// The memory of the step that began last, which must have ended. `on_host`: shards, gradients
  /// and the optimizer's state are in the host's memory, not at the peak. `unit_of`: the unit of a
  /// module, by its FQN (for the model itself the name of its class), or ""; empty: none is known.
  StepMemory use(bool on_host,
                 const std::function<std::string(const std::string& module)>& unit_of = {}) const;

  void entered(Activity activity, const std::string& name) override;
  void left() override;

 private:
  class Lanes;
  struct Owner {
    std::string name;  ///< a module's FQN, or a unit as messages name it; "": none
    bool is_unit = false;
    auto operator<=>(const Owner&) const = default;
  };
  struct OwnedPart {
    std::size_t owner;
    std::int64_t bytes;
  };
  struct Block {
    const void* data = nullptr;
    std::int64_t bytes = 0;
    MemoryPhase born = MemoryPhase::kSetup;
    comm::Lane lane = comm::Lane::kCompute;
    std::size_t owner = 0;                     ///< in owners_
    std::map<const void*, OwnedPart> parts{};  ///< that were assigned
    /// The number of phases before, and before the block went: of one that lives, the highest.
    int began = 0, ended = 0;
    bool earlier = false;   ///< than the step
    bool is_state = false;  ///< of the optimizer
  };
  struct Event {
    std::uint64_t number;
    bool freed;
    MemoryPhase phase;
    std::size_t moment;  ///< in moments_
  };

  void assign(const at::Tensor& tensor, const std::string& module, bool is_state);
  void note(const TensorBlock& block);
  void note_peak();
  void update_moment();
  void update_phase();
  std::size_t number_of(const Owner& owner);
  std::size_t owner_of_new() const;
  static MemoryKind kind_of(const Block& block);
  class Count;
  std::vector<std::string> units(const std::function<std::string(const std::string&)>& of) const;

  mutable std::mutex mutex_;
  bool reserve_only_;
  std::thread::id thread_ = std::this_thread::get_id();  ///< that makes the steps
  std::unordered_map<std::uint64_t, Block> blocks_;
  std::map<const void*, std::uint64_t> live_blocks_;  ///< by address
  std::vector<Event> events_;                         ///< of the step
  std::vector<Owner> owners_{Owner{}};
  std::map<Owner, std::size_t> owner_numbers_{{Owner{}, 0}};
  std::vector<std::size_t> modules_;           ///< that are under way, the innermost last
  std::array<std::size_t, 4> communicated_{};  ///< the unit that a lane works for
  MemoryPhase phase_ = MemoryPhase::kSetup;
  int phases_ = 0;
  comm::Lane lane_ = comm::Lane::kCompute;
  std::int64_t live_ = 0, peak_ = 0;
  std::size_t peak_event_ = 0;
  std::function<std::string()> where_;
  std::string peak_moment_;
  bool follows_moments_ = false;
  std::vector<std::string> moments_{""};  ///< names
  std::size_t moment_ = 0;                ///< that of the last allocation
};

}  // namespace tessera::observe
TESSERA_API_END
