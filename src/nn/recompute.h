// The parts of activation checkpointing: the state of a thread, recorded operators, one forward (a
// frame), its recomputation (a replay), and the regions that a thread is in.
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
#include <utility>
#include <vector>

#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn::detail {

/// The states of random number generators: this thread's of tessera::manual_seed, and libtorch's of
/// the CPU and other devices.
class RandomSnapshot {
 public:
  /// The states of the CPU's generators and of those of the devices of `tensors`.
  explicit RandomSnapshot(std::span<at::Tensor* const> tensors);

  /// The current states of the same generators.
  RandomSnapshot retaken() const;
  void restore() const;
  /// Forgets libtorch's generators whose state has not changed: they were not used, and need no
  /// replay.
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

/// The state of a thread on which the results of a forward depend, besides its tensors: dispatch
/// keys with autocast, strict and replication scopes, the part of the batch (RandomRegion), and
/// random number generators.
class ThreadState {
 public:
  ThreadState(std::span<at::Tensor* const> inputs, bool with_random_state);
  /// To be called after forward: forgets the generators that it did not use.
  void settle();

  /// Within the scope, this thread has that state again, and gradients are recorded.
  class Restored {
   public:
    explicit Restored(const ThreadState& then);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    // The previous state of the thread, in the order of changes; destroyed in reverse.
    c10::AutoGradMode grad_mode_;
    tessera::detail::RestoreKeys keys_;  // with them, whether autocast is on
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

/// The results of operators that the policy of a region saved.
class OperatorLog {
 public:
  using Results = OperatorMode::Results;

  /// `packed`: how many tensors autograd had saved until then.
  void keep(const std::string& name, std::size_t index, const Results& results, std::size_t packed,
            std::optional<RandomSnapshot> random_after);
  /// Tensors in `results` share the version counter of saved results with the same memory.
  void watch_aliases(const Results& results);
  /// Drops results after the last tensor that autograd saved: recomputation stops before them.
  void forget_after(std::size_t packed);
  /// The results of a call, or nullopt if they are not saved (any more). `last`: this is their last
  /// use. Sets the generators to their state after the operator. Throws Error if a result was
  /// modified in place since.
  std::optional<Results> replay(const std::string& name, std::size_t index, bool last);

 private:
  struct Kept {
    Results results;
    std::vector<std::uint32_t> versions;  ///< of the tensors in the results
    std::size_t packed = 0;
    std::optional<RandomSnapshot> random_after;
  };
  // By operator and the number of its call.
  std::unordered_map<std::string, std::map<std::size_t, Kept>> kept_;
};

/// In forward: saves the results that the policy names. Also calls an existing mode.
class RecordOperators final : public OperatorMode {
 public:
  RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                  std::function<std::size_t()> packed, std::span<at::Tensor* const> inputs);
  Results call(const Operator& op, const std::function<Results()>& run) override;

 private:
  OperatorLog& log_;
  const CheckpointOptions& options_;
  // Called for each saved result, because autograd saves tensors in between.
  std::function<std::size_t()> packed_;
  std::optional<RandomSnapshot> random_;  ///< names the generators
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

/// In recomputation: returns the saved results.
class ReplayOperators final : public OperatorMode {
 public:
  ReplayOperators(OperatorLog& log, CheckpointCounts* counts) : log_(log), counts_(counts) {}
  Results call(const Operator& op, const std::function<Results()>& run) override;

 private:
  OperatorLog& log_;
  CheckpointCounts* counts_;
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

/// Properties of a tensor that a region's forward saved: the recomputation must have the same.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  /// Throws Error if `again`, the `index`-th tensor that the recomputation saves, is another.
  void check(const at::Tensor& again, std::size_t index) const;

 private:
  std::string text() const;
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;

  std::vector<std::int64_t> sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  std::optional<ShardingSpec> sharding_;
};

/// A tensor that a recomputation saved again, until backward takes it.
class RecomputedTensor {
 public:
  explicit RecomputedTensor(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(tensor._version()) {}
  /// Throws Error if it was modified in place since it was saved.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_;
};

/// One entry for each tensor that forward saved; empty if it is not needed (any more).
using RecomputedTensors = std::vector<std::optional<RecomputedTensor>>;

/// Everything to run one forward of a checkpointed function again. The placeholders in the graph
/// own it, so that it lives as long as the graph.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// Make it before the region begins, so that an outer region packs the inputs.
  Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun);

  const CheckpointOptions& options() const { return options_; }

  // In forward.

  /// Records the properties of a tensor that autograd does not save; returns its number.
  std::size_t pack(const at::Tensor& tensor);
  std::size_t packed() const { return saved_.size(); }
  void record_count(std::uint64_t count) { counts_.push_back(count); }
  OperatorLog& operators() { return operators_; }
  void finish();

  // In backward.

  /// The `index`-th tensor, recomputed unless this backward has recomputed it before. Throws what
  /// the function throws, and Error if it does not save the same tensors again.
  at::Tensor unpack(std::size_t index);
  /// The `index`-th tensor is not needed any more.
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
  // As saved variables: an outer region replaces them in turn, and autograd checks their versions.
  std::vector<tessera::detail::SavedVariable> inputs_;
  Rerun rerun_;
  // A deque, since an atomic cannot be moved and Saved must stay where it is.
  std::deque<Saved> saved_;
  std::vector<std::uint64_t> counts_;
  OperatorLog operators_;
  // Until finish(), a backward within the forward sees a log that is not complete.
  bool finished_ = false;

  std::mutex mutex_;                             ///< backward may use several threads
  std::map<int, RecomputedTensors> recomputed_;  ///< by graph task
};

/// The call of a checkpointed function that this thread is in: its forward, or its recomputation.
/// Regions nest; the innermost one decides what autograd saves for backward.
class CheckpointedRegion {
 public:
  CheckpointedRegion();
  virtual ~CheckpointedRegion();
  CheckpointedRegion(const CheckpointedRegion&) = delete;
  CheckpointedRegion& operator=(const CheckpointedRegion&) = delete;

  /// The hooks of the next tensor that autograd saves.
  virtual std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() = 0;
  /// Whether this is a recomputation. If so, replay_count() gives the counts that the forward
  /// recorded, one after another; see replayed_count().
  virtual bool replays() const = 0;
  virtual std::uint64_t replay_count() = 0;
  virtual void record_count(std::uint64_t count) = 0;

  CheckpointedRegion* outer() const { return outer_; }
  static CheckpointedRegion* innermost();

 private:
  // Regions are on the stack, so that the one around outlives this one.
  CheckpointedRegion* outer_;
};

/// Installs the saved-tensor hooks of regions in autograd's engine; once for the process. Throws
/// Error if another autograd engine than libtorch's own is installed (Python brings one): replacing
/// it would break its users.
void install_engine();

/// Thrown out of a recomputation that has all needed tensors. Not a std::exception, so that
/// handlers of the function do not catch it.
struct StopRecomputation {};

/// The recomputation of a frame, as a scope: takes the tensors that autograd would save.
class Replay final : public CheckpointedRegion {
 public:
  explicit Replay(Frame& frame);

  /// Takes the next tensor; throws StopRecomputation after the last.
  void pack(const at::Tensor& tensor);
  /// Call it when the function has returned. Throws Error if it saved too few tensors.
  void finish();
  RecomputedTensors take() { return std::move(tensors_); }

  std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() override;
  bool replays() const override { return true; }
  std::uint64_t replay_count() override;
  void record_count(std::uint64_t) override {}

 private:
  Frame& frame_;
  RecomputedTensors tensors_;
  // Positions in the forward's records: saved tensors so far, and counts so far.
  std::size_t packed_ = 0;
  std::size_t next_count_ = 0;
  std::optional<ReplayOperators> operators_;
  std::optional<OperatorModeScope> mode_;
};

}  // namespace tessera::nn::detail
