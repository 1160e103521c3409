// The classes of activation checkpointing: the state of a thread, the log of operator results, one
// forward (Frame), its recomputation (Replay), and the regions in which a thread is.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/records.h"

namespace tessera::nn::detail {

/// A snapshot of random generator states: this thread's state of tessera::manual_seed, and
/// libtorch's generators of the CPU and other devices.
class RandomSnapshot {
 public:
  /// Takes the states of the CPU's generators and of the generators of the devices of `tensors`.
  explicit RandomSnapshot(std::span<at::Tensor* const> tensors);

  /// A new snapshot of the same generators.
  RandomSnapshot retaken() const;
  void restore() const;
  /// Drops those of libtorch's generators whose state has not changed since the snapshot.
  void forget_unmoved();

 private:
  struct State {
    at::Generator generator;
    at::Tensor value;
  };
  RandomSnapshot() = default;

  RandomState ours_ = random_state();
  std::vector<State> states_;
};

/// The thread state on which the results of a forward depend, in addition to its tensors: dispatch
/// keys, autocast, strict and replication scopes, the part of the batch (RandomRegion), and random
/// generators.
class ThreadState {
 public:
  ThreadState(std::span<at::Tensor* const> inputs, bool with_random_state);
  /// Must be called after the forward. Drops the generators that the forward did not use.
  void settle();

  /// A scope in which this thread has the saved state again and records gradients.
  class Restored {
   public:
    explicit Restored(const ThreadState& then);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    // The thread's state before the scope, in the order of the changes; members are destroyed in
    // reverse.
    c10::AutoGradMode grad_mode_;
    tessera::detail::RestoreKeys keys_;  // dispatch keys, which include whether autocast is on
    StrictScope strict_;
    ReplicationScope replication_;
    tessera::detail::RandomRegionScope region_;
    tessera::detail::AutocastState autocast_;
    std::optional<RandomSnapshot> random_;
  };

 private:
  tessera::detail::KeysOfThread keys_;
  bool strict_;
  bool replicates_plain_;
  tessera::detail::RandomRegionPtr region_;
  tessera::detail::AutocastState autocast_;
  std::optional<RandomSnapshot> random_;
};

/// The log of operator results that the policy of a checkpointed region has saved.
class OperatorLog {
 public:
  using Results = OperatorMode::Results;

  /// Saves the results of a call. `packed`: the number of tensors that autograd had saved before.
  void keep(const std::string& name, std::size_t index, const Results& results, std::size_t packed,
            std::optional<RandomSnapshot> random_after);
  /// Makes `results` share the version counters of saved results that use the same memory.
  void watch_aliases(const Results& results);
  /// Drops results of operators after the first `packed` saved tensors, which the recomputation
  /// does not reach.
  void forget_after(std::size_t packed);
  /// The saved results of a call; nullopt if they were not saved or have been freed. `last`:
  /// whether to free the results after this use. Sets the generators to their state after the
  /// operator. Throws Error if a result was modified in place after forward.
  std::optional<Results> replay(const std::string& name, std::size_t index, bool last);

 private:
  struct Kept {
    Results results;
    std::vector<std::uint32_t> versions;  ///< version counters of the tensors in the results
    std::size_t packed = 0;
    std::optional<RandomSnapshot> random_after;
  };
  // Saved results, indexed by the operator's name and then by the number of the call.
  std::unordered_map<std::string, std::map<std::size_t, Kept>> kept_;
};

/// An operator mode that saves the results that the policy selects, and also calls the mode that
/// was active before.
class RecordOperators final : public OperatorMode {
 public:
  RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                  std::function<std::size_t()> packed, std::span<at::Tensor* const> inputs);
  Results call(const Operator& op, const std::function<Results()>& run) override;

 private:
  OperatorLog& log_;
  const CheckpointOptions& options_;
  // Returns the number of tensors that autograd has saved so far. Called for each saved result.
  std::function<std::size_t()> packed_;
  std::optional<RandomSnapshot> random_;  ///< defines the set of generators whose states are saved
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

/// Properties of a tensor that a region's forward saved; the recomputation must produce the same.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  /// Throws Error if `again`, the recomputed tensor number `index`, has other properties.
  void check(const at::Tensor& again, std::size_t index) const;

 private:
  std::string text() const;
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;

  std::vector<std::int64_t> sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  std::optional<ShardingSpec> sharding_;
};

/// A recomputed tensor, stored until backward takes it.
class RecomputedTensor {
 public:
  explicit RecomputedTensor(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(tensor._version()) {}
  /// Throws Error if the tensor was modified in place after it was stored.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_;
};

/// The recomputed tensors, one entry for each saved tensor. An entry is empty if its tensor is not
/// needed or was already taken.
using RecomputedTensors = std::vector<std::optional<RecomputedTensor>>;

/// All data that is needed to run one forward of a checkpointed function again. The placeholders in
/// autograd's graph own the frame, so it exists as long as the graph.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// The frame must be constructed before its region begins, so that an outer region packs the
  /// inputs.
  Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun);

  const CheckpointOptions& options() const { return options_; }

  // Functions for the forward:

  /// Records the properties of a tensor, which autograd does not save itself. Returns the tensor's
  /// number.
  std::size_t pack(const at::Tensor& tensor);
  std::size_t packed() const { return saved_.size(); }
  void record_count(std::uint64_t count) { counts_.push_back(count); }
  OperatorLog& operators() { return operators_; }
  void finish();

  // Functions for the backward:

  /// Saved tensor number `index`, recomputed unless this backward has already recomputed it. Passes
  /// the function's exceptions on. Throws Error if the function does not save the same tensors
  /// again.
  at::Tensor unpack(std::size_t index);
  /// Marks saved tensor number `index` as no longer needed.
  void release(std::size_t index) noexcept { saved_[index].needed = false; }

 private:
  friend class Replay;
  struct Saved {
    explicit Saved(const at::Tensor& saved) : tensor(saved) {}
    SavedTensor tensor;
    std::atomic<bool> needed = true;
  };

  RecomputedTensors recompute();
  std::vector<at::Tensor> unpack_inputs() const;
  void forget_after_backward(int graph_task);

  CheckpointOptions options_;
  ThreadState thread_state_;
  // The inputs as autograd's saved variables, so that an outer region can replace them and autograd
  // checks their versions.
  std::vector<tessera::detail::SavedVariable> inputs_;
  Rerun rerun_;
  // A deque, since its elements contain an atomic, which cannot be moved, and must keep their
  // addresses.
  std::deque<Saved> saved_;
  std::vector<std::uint64_t> counts_;
  OperatorLog operators_;
  // Whether the forward has finished. Before that, a backward inside the forward sees an incomplete
  // log.
  bool finished_ = false;

  /// Protects recomputed_, because a backward may use several threads for one graph.
  std::mutex mutex_;
  /// Recomputed tensors of each backward, indexed by the id of its graph task.
  std::map<int, RecomputedTensors> recomputed_;
};

/// A call of a checkpointed function on this thread: its forward or its recomputation. Regions
/// nest; the innermost region decides what autograd saves for backward.
class CheckpointedRegion {
 public:
  CheckpointedRegion();
  virtual ~CheckpointedRegion();
  CheckpointedRegion(const CheckpointedRegion&) = delete;
  CheckpointedRegion& operator=(const CheckpointedRegion&) = delete;

  /// Returns the hooks for the next tensor that autograd saves.
  virtual std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() = 0;
  /// Whether this region is a recomputation. If so, replay_count() returns the counts that the
  /// forward recorded, one after another; see replayed_count().
  virtual bool replays() const = 0;
  virtual std::uint64_t replay_count() = 0;
  virtual void record_count(std::uint64_t count) = 0;

  CheckpointedRegion* outer() const { return outer_; }
  static CheckpointedRegion* innermost();

 private:
  // The region around this one. Regions are on the stack, so the outer region outlives the inner
  // region.
  CheckpointedRegion* outer_;
};

/// Installs the regions' saved-tensor hooks in autograd's engine; only the first call in a process
/// has an effect. Throws Error if an autograd engine other than libtorch's is installed (as Python
/// does), because replacing it would break its users.
void install_engine();

}  // namespace tessera::nn::detail
