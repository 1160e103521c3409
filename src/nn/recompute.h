// The components of activation checkpointing: the state of a thread, recorded operators, one
// forward (a frame), its recomputation (a replay), and the regions that a thread is in.
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
#include "tessera/nn/detail/checkpoint_counts.h"

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
  /// Drops libtorch's generators whose state has not changed since.
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

/// The thread state on which a forward's results depend, besides tensors: dispatch keys, autocast,
/// strict and replication scopes, the part of the batch (RandomRegion), and random generators.
class ThreadState {
 public:
  ThreadState(std::span<at::Tensor* const> inputs, bool with_random_state);
  /// Call it after the forward: drops the generators that the forward did not use.
  void settle();

  /// Scope in which this thread has the saved state again and records gradients.
  class Restored {
   public:
    explicit Restored(const ThreadState& then);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    // The thread's previous state, in the order of the changes; members are destroyed in reverse.
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

/// The operator results that a region's policy saved.
class OperatorLog {
 public:
  using Results = OperatorMode::Results;

  /// Saves the results of a call. `packed`: the number of tensors that autograd had saved before.
  void keep(const std::string& name, std::size_t index, const Results& results, std::size_t packed,
            std::optional<RandomSnapshot> random_after);
  /// Makes `results` share the version counters of saved results in the same memory.
  void watch_aliases(const Results& results);
  /// Drops results of operators that the recomputation does not reach.
  void forget_after(std::size_t packed);
  /// The saved results of a call; nullopt if they were not saved or have been freed. `last`: frees
  /// them after this use. Sets the generators to their state after the operator. Throws Error if a
  /// result was modified in place after forward.
  std::optional<Results> replay(const std::string& name, std::size_t index, bool last);

 private:
  struct Kept {
    Results results;
    std::vector<std::uint32_t> versions;  ///< versions of the tensors in the results
    std::size_t packed = 0;
    std::optional<RandomSnapshot> random_after;
  };
  // Indexed by operator name, then by the call's number.
  std::unordered_map<std::string, std::map<std::size_t, Kept>> kept_;
};

/// Saves the results that the policy selects; also calls the mode that was active before.
class RecordOperators final : public OperatorMode {
 public:
  RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                  std::function<std::size_t()> packed, std::span<at::Tensor* const> inputs);
  Results call(const Operator& op, const std::function<Results()>& run) override;

 private:
  OperatorLog& log_;
  const CheckpointOptions& options_;
  // Returns the number of tensors that autograd has saved; called for each saved result, because
  // autograd saves tensors in between.
  std::function<std::size_t()> packed_;
  std::optional<RandomSnapshot> random_;  ///< defines the set of generators whose states are saved
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

/// Properties of a tensor that a region's forward saved; the recomputation must produce the same.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  /// Throws Error if `again`, the `index`-th recomputed tensor, has other properties.
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

/// One entry for each saved tensor; empty if the tensor is not needed or already taken.
using RecomputedTensors = std::vector<std::optional<RecomputedTensor>>;

/// All data that is needed to run one forward of a checkpointed function again. The placeholders in
/// the graph own it, so it lives as long as the graph.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// Construct the frame before the region begins, so that an outer region packs the inputs.
  Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun);

  const CheckpointOptions& options() const { return options_; }

  // Used in forward:

  /// Records the properties of a tensor that autograd does not save; returns the tensor's number.
  std::size_t pack(const at::Tensor& tensor);
  std::size_t packed() const { return saved_.size(); }
  void record_count(std::uint64_t count) { counts_.push_back(count); }
  OperatorLog& operators() { return operators_; }
  void finish();

  // Used in backward:

  /// The `index`-th tensor, recomputed unless this backward has already recomputed it. Passes the
  /// function's exceptions on; throws Error if the function does not save the same tensors again.
  at::Tensor unpack(std::size_t index);
  /// Marks the `index`-th tensor as no longer needed.
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
  // An outer region replaces saved variables in turn, and autograd checks their versions.
  std::vector<tessera::detail::SavedVariable> inputs_;
  Rerun rerun_;
  // A deque, since an atomic cannot be moved and a Saved must keep its address.
  std::deque<Saved> saved_;
  std::vector<std::uint64_t> counts_;
  OperatorLog operators_;
  // While this is false, a backward inside the forward sees an incomplete log.
  bool finished_ = false;

  std::mutex mutex_;                             ///< backward may use several threads of one graph
  std::map<int, RecomputedTensors> recomputed_;  ///< recomputed tensors, indexed by graph task
};

/// The call of a checkpointed function that this thread is in: its forward or its recomputation.
/// Regions nest; the innermost region decides what autograd saves for backward.
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
  // Regions are on the stack, so the outer region outlives this one.
  CheckpointedRegion* outer_;
};

/// Installs the regions' saved-tensor hooks in autograd's engine; effective once for the process.
/// Throws Error if an autograd engine other than libtorch's is installed (as Python does), because
/// replacing it would break its users.
void install_engine();

}  // namespace tessera::nn::detail
