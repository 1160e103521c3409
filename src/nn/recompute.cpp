// checkpoint(): the forward of an activation-checkpointed function, and its recomputation.

#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/records.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <unordered_map>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::nn::detail {

// The modes and random generators of a thread. A recomputation restores the modes and generator
// states of the forward, because backward runs on other threads and in other modes.

namespace {

/// Returns a generator's state. Locks the generator, as libtorch requires for shared generators.
at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::vector<c10::Device> devices_of(std::span<at::Tensor* const> tensors) {
  // The checkpointed function can draw random numbers on the CPU even if all inputs are on GPUs.
  std::vector<c10::Device> devices{c10::Device(c10::kCPU)};
  for (const at::Tensor* tensor : tensors) {
    const bool draws = tensor->defined() && tensor->is_cuda();
    if (draws && std::ranges::find(devices, tensor->device()) == devices.end()) {
      devices.push_back(tensor->device());
    }
  }
  return devices;
}

}  // namespace

/// States of random generators: of this thread's tessera::manual_seed, and of libtorch's generators
/// for the CPU and for some GPUs.
class RandomSnapshot {
 public:
  /// Saves the state of the CPU's generator, and of the generator of each GPU that has some of
  /// `tensors`.
  explicit RandomSnapshot(std::span<at::Tensor* const> tensors) {
    for (const c10::Device device : devices_of(tensors)) {
      const at::Generator& generator = at::globalContext().defaultGenerator(device);
      states_.push_back({generator, state_of(generator)});
    }
  }

  RandomSnapshot retaken() const {
    RandomSnapshot now;
    for (const State& state : states_) {
      now.states_.push_back({state.generator, state_of(state.generator)});
    }
    return now;
  }
  void restore() const {
    set_random_state(ours_);
    for (const State& state : states_) {
      at::Generator generator = state.generator;
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state.value);
    }
  }
  /// Removes the saved states of generators that have drawn nothing since the states were saved.
  void forget_unmoved() {
    std::erase_if(states_, [](const State& state) {
      return equal_bytes(state.value, state_of(state.generator));
    });
  }

 private:
  struct State {
    at::Generator generator;
    at::Tensor value;
  };
  RandomSnapshot() = default;

  RandomState ours_ = random_state();
  std::vector<State> states_;
};

/// All state of a thread that affects the results of a forward: dispatch keys, autocast,
/// StrictScope, ReplicationScope, the rows of the batch (RandomRegion), and random generators.
struct ThreadState {
  explicit ThreadState(std::span<at::Tensor* const> inputs) : random(inputs) {}

  tessera::detail::KeysOfThread keys = tessera::detail::keys_of_thread();
  bool strict = is_strict();
  bool replicates_plain = plain_tensors_are_replicated();
  tessera::detail::RandomRegionPtr region = tessera::detail::random_region();
  tessera::detail::AutocastState autocast = tessera::detail::autocast_state();
  RandomSnapshot random;
};

/// While a RestoredThread exists, this thread records gradients and has the forward's ThreadState.
class RestoredThread : tessera::detail::NoCopy {
 public:
  explicit RestoredThread(const ThreadState& then)
      : keys_(then.keys),
        strict_(then.strict),
        replication_(then.replicates_plain),
        region_(then.region, /*replays=*/true),
        random_(then.random.retaken()) {
    // Autocast must not cache casts here: nothing would clear the cache before the optimizer
    // changes the weights.
    tessera::detail::set_autocast_state({then.autocast.types, /*keeps_casts=*/false});
    then.random.restore();
  }
  ~RestoredThread() {
    random_.restore();
    tessera::detail::set_autocast_state(autocast_);
  }

 private:
  // The previous state of this thread, which the members' destructors restore in reverse order of
  // declaration.
  c10::AutoGradMode grad_mode_{true};
  tessera::detail::RestoreKeys keys_;  // dispatch keys, including those of autocast
  StrictScope strict_;
  ReplicationScope replication_;
  tessera::detail::RandomRegionScope region_;
  tessera::detail::AutocastState autocast_ = tessera::detail::autocast_state();
  RandomSnapshot random_;
};

// Selective activation checkpointing. Forward saves the results of operators that a policy selects,
// and the recomputation returns the saved results. A call is identified by the operator's name and
// call number.

namespace {

using Results = OperatorMode::Results;

Results unrecorded_all(const Results& results) {
  Results copies;
  copies.reserve(results.size());
  for (const c10::IValue& result : results) {
    // Autograd adds its own state to each result of an operator, so the saved aliases must have no
    // autograd state.
    copies.push_back(kernels::with_tensors(
        result, [](const at::Tensor& tensor) { return tessera::detail::alias_tensor(tensor); }));
  }
  return copies;
}

std::vector<std::uint32_t> versions_of(const Results& results) {
  std::vector<std::uint32_t> versions;
  kernels::visit_tensors(results, [&](const at::Tensor& tensor) {
    versions.push_back(tessera::detail::writes_of(tensor));
  });
  return versions;
}

Results call_next(OperatorMode* outer, const OperatorMode::Operator& op,
                  const std::function<Results()>& run) {
  return outer != nullptr ? outer->call(op, run) : run();
}

}  // namespace

class OperatorLog {
 public:
  /// Saves the results of an operator call. `packed`: the number of tensors that autograd has saved
  /// so far.
  void keep(const std::string& name, std::size_t index, const Results& results, std::size_t packed,
            std::optional<RandomSnapshot> random_after) {
    kept_[name][index] = {unrecorded_all(results), versions_of(results), packed,
                          std::move(random_after)};
  }
  /// If `results` share memory with saved results, lets both share a version counter.
  void watch_aliases(const Results& results) {
    kernels::visit_tensors(results, [&](const at::Tensor& result) {
      for (const auto& [name, calls] : kept_) {
        for (const auto& [index, kept] : calls) {
          kernels::visit_tensors(kept.results, [&](const at::Tensor& tensor) {
            if (local_tensor(tensor).is_alias_of(local_tensor(result))) {
              tessera::detail::count_with(result, tensor);
            }
          });
        }
      }
    });
  }
  /// Drops the results of operators that ran after autograd saved its last tensor, because a
  /// recomputation stops at the last saved tensor. `packed`: number of tensors that autograd saved.
  void forget_after(std::size_t packed) {
    for (auto& [name, calls] : kept_) {
      std::erase_if(calls, [&](const auto& call) { return call.second.packed == packed; });
    }
  }
  /// Returns the saved results of an operator call, or nullopt. Sets the random generators to their
  /// state after the call in forward. `last`: whether to free the saved results. Throws Error if a
  /// result was modified in place.
  std::optional<Results> replay(const std::string& name, std::size_t index, bool last) {
    auto& calls = kept_[name];
    const auto found = calls.find(index);
    if (found == calls.end()) {
      return std::nullopt;
    }
    const Kept& kept = found->second;
    TESSERA_CHECK(versions_of(kept.results) == kept.versions, "checkpoint: the result of ", name,
                  ", call ", index,
                  " in the checkpointed region, was saved and then modified in place; let the "
                  "policy recompute that operator, or write to a copy");
    if (kept.random_after) {
      // Later operators must draw the same random numbers as in forward, although this operator
      // does not run again.
      kept.random_after->restore();
    }
    Results results = unrecorded_all(kept.results);
    if (last) {
      calls.erase(found);
    }
    return results;
  }

 private:
  struct Kept {
    Results results;
    std::vector<std::uint32_t> versions;
    std::size_t packed = 0;
    std::optional<RandomSnapshot> random_after;
  };
  std::unordered_map<std::string, std::map<std::size_t, Kept>> kept_;
};

/// In forward, saves the results of the operators that the policy selects. Also calls the
/// OperatorMode that was active before.
class RecordOperators final : public OperatorMode {
 public:
  RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                  std::function<std::size_t()> packed, std::span<at::Tensor* const> inputs)
      : log_(log), options_(options), packed_(std::move(packed)), random_(inputs) {}
  Results call(const Operator& op, const std::function<Results()>& run) override {
    Results results = call_next(outer_, op, run);
    const std::size_t index = calls_[op.name]++;
    if (options_.policy({op.name, index})) {
      std::optional<RandomSnapshot> after;
      if (op.draws_random) {
        after.emplace(random_.retaken());
      }
      log_.keep(op.name, index, results, packed_(), std::move(after));
      if (options_.counts != nullptr) {
        ++options_.counts->kept_operators;
      }
    } else if (op.name == "aten::_unsafe_view") {
      // matmul returns a result of _unsafe_view, which libtorch does not mark as a view of the
      // product. The product and the result of matmul must share a version counter.
      log_.watch_aliases(results);
    }
    return results;
  }

 private:
  OperatorLog& log_;
  const CheckpointOptions& options_;
  std::function<std::size_t()> packed_;
  RandomSnapshot random_;
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

/// In a recomputation, returns the saved results of operators instead of running the operators
/// again.
class ReplayOperators final : public OperatorMode {
 public:
  ReplayOperators(OperatorLog& log, CheckpointCounts* counts) : log_(log), counts_(counts) {}
  Results call(const Operator& op, const std::function<Results()>& run) override {
    // The saved results are freed, unless this backward keeps its graph (retain_graph).
    const bool last = !tessera::detail::keeps_graph();
    const std::size_t index = calls_[op.name]++;
    std::optional<Results> kept = log_.replay(op.name, index, last);
    if (counts_ != nullptr) {
      ++(kept ? counts_->replayed_operators : counts_->recomputed_operators);
    }
    return kept ? std::move(*kept) : call_next(outer_, op, run);
  }

 private:
  OperatorLog& log_;
  CheckpointCounts* counts_;
  OperatorMode* outer_ = active_operator_mode();
  std::unordered_map<std::string, std::size_t> calls_;
};

// A Frame has the data of one forward of a checkpointed function. Autograd saves placeholders
// instead of tensors. The first placeholder that backward unpacks starts the recomputation of all
// tensors.

class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor)
      : sizes_(tensor.sizes().vec()), dtype_(tensor.scalar_type()), device_(tensor.device()) {
    // Layouts are compared, too: distributed tensors with different shards can have equal sizes(),
    // because sizes() are global sizes.
    if (tessera::is_distributed(tensor)) {
      sharding_ = sharding_spec(tensor);
    }
  }
  /// Throws Error if `again`, the recomputed tensor, has other sizes, dtype, device or layout.
  /// `index`: the tensor's index among the saved tensors.
  void check(const at::Tensor& again, std::size_t index) const {
    const SavedTensor found(again);
    TESSERA_CHECK(found == *this, "checkpoint: the recomputation saved tensor ", index,
                  " for backward as ", found.text(), ", but the forward saved it as ", text(),
                  "; the checkpointed function must do the same both times: let it depend on its "
                  "arguments, parameters and random numbers only");
  }

 private:
  std::string text() const {
    std::ostringstream text;
    text << dtype_ << c10::IntArrayRef(sizes_) << " on " << device_;
    if (sharding_) {
      text << ", layout " << to_string(*sharding_->layout);
    }
    return text.str();
  }
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;

  std::vector<std::int64_t> sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  std::optional<ShardingSpec> sharding_;
};

class RecomputedTensor {
 public:
  explicit RecomputedTensor(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(tensor._version()) {}
  const at::Tensor& get() const {
    TESSERA_CHECK(tensor_._version() == version_, "checkpoint: a tensor of sizes ", tensor_.sizes(),
                  " that backward needs was modified in place after it was saved; write to a copy");
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  std::int64_t version_;
};

/// The recomputed tensors, in the order in which forward saved tensors. Elements that backward does
/// not need, or has used, are empty.
using RecomputedTensors = std::vector<std::optional<RecomputedTensor>>;

/// All data that is needed to run a checkpointed function again. The placeholders in autograd's
/// graph own the Frame, so the Frame exists as long as the graph.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// A Frame must be constructed before its checkpointed region begins, so that an enclosing region
  /// saves the Frame's inputs.
  Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun)
      : options_(options), thread_state_(inputs), rerun_(std::move(rerun)) {
    for (const at::Tensor* input : inputs) {
      inputs_.emplace_back(*input, /*is_output=*/false);
    }
  }

  const CheckpointOptions& options() const { return options_; }

  /// Called for each tensor that autograd saves in forward. Records sizes, dtype, device and layout
  /// of the tensor, and returns the tensor's index in saved_.
  std::size_t pack(const at::Tensor& tensor) {
    saved_.emplace_back(tensor);
    if (options_.counts != nullptr) {
      ++options_.counts->packed;
    }
    return saved_.size() - 1;
  }
  std::size_t packed() const { return saved_.size(); }
  void record_count(std::uint64_t count) { counts_.push_back(count); }
  OperatorLog& operators() { return operators_; }
  void finish() {
    thread_state_.random.forget_unmoved();
    operators_.forget_after(packed());
  }

  /// Returns the tensor that forward saved with index `index`. Runs the checkpointed function if
  /// necessary. Throws Error if the function saves other tensors than in forward.
  at::Tensor unpack(std::size_t index);
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
  // The inputs of the checkpointed function, as SavedVariables: autograd then detects in-place
  // writes, and an enclosing checkpointed region can recompute the inputs.
  std::vector<tessera::detail::SavedVariable> inputs_;
  Rerun rerun_;
  std::deque<Saved> saved_;
  std::vector<std::uint64_t> counts_;
  OperatorLog operators_;

  /// Protects recomputed_, because a backward can use several threads for one graph.
  std::mutex mutex_;
  /// The recomputed tensors of each backward; the key is backward_id().
  std::map<int, RecomputedTensors> recomputed_;
};

at::Tensor Frame::unpack(std::size_t index) {
  const std::lock_guard lock(mutex_);
  const int graph_task = tessera::detail::backward_id();
  // Outside of a backward, recomputed tensors are not stored, because nothing would free them.
  if (graph_task < 0) {
    return recompute()[index]->get();
  }
  // Two backwards can run over one graph (retain_graph), even at the same time. Each backward has
  // its own recomputed tensors.
  const auto [run, is_new] = recomputed_.try_emplace(graph_task);
  if (is_new) {
    forget_after_backward(graph_task);
  }
  RecomputedTensors& tensors = run->second;
  // Recomputes the tensor again if a node unpacks the tensor a second time.
  if (tensors.empty() || !tensors[index]) {
    tensors = recompute();
  }
  return std::exchange(tensors[index], std::nullopt)->get();
}

void Frame::forget_after_backward(int graph_task) {
  tessera::detail::queue_end_of_backward([frame = weak_from_this(), graph_task] {
    if (const std::shared_ptr<Frame> alive = frame.lock()) {
      const std::lock_guard lock(alive->mutex_);
      alive->recomputed_.erase(graph_task);
    }
  });
}

std::vector<at::Tensor> Frame::unpack_inputs() const {
  std::vector<at::Tensor> inputs;
  for (const tessera::detail::SavedVariable& saved : inputs_) {
    const at::Tensor input = saved.unpack();
    // Each input is a new leaf, so that the graph of the recomputation is separate from the graph
    // of the running backward.
    inputs.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad())
                                     : input);
  }
  return inputs;
}

class CheckpointedRegion;

namespace {
thread_local CheckpointedRegion* innermost_here = nullptr;
}  // namespace

/// A forward or a recomputation of a checkpointed function on this thread. Regions nest; the
/// innermost region decides what autograd saves for backward.
class CheckpointedRegion : tessera::detail::NoCopy {
 public:
  CheckpointedRegion() : outer_(std::exchange(innermost_here, this)) {}
  virtual ~CheckpointedRegion() { innermost_here = outer_; }

  /// Returns the saved-tensor hooks for the next tensor that autograd saves for backward.
  virtual std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() = 0;
  /// Whether this region is a recomputation. Then each call of replay_count() returns the next of
  /// the numbers that forward passed to record_count(), in the same order; see replayed_count().
  virtual bool replays() const { return false; }
  virtual std::uint64_t replay_count() { return 0; }
  virtual void record_count(std::uint64_t /*count*/) {}

  CheckpointedRegion* outer() const { return outer_; }

 private:
  CheckpointedRegion* outer_;
};

/// Thrown to end a recomputation when all needed tensors are recomputed. Not derived from
/// std::exception, so that handlers in the checkpointed function do not catch StopRecomputation.
struct StopRecomputation {};

/// The recomputation runs the checkpointed function with autograd on, so that autograd saves the
/// same tensors in the same order as in forward.
class Replay final : public CheckpointedRegion {
 public:
  explicit Replay(Frame& frame) : frame_(frame), tensors_(frame.packed()) {
    if (frame.options().policy) {
      operators_.emplace(frame.operators(), frame.options().counts.get());
      mode_.emplace(*operators_);
    }
  }

  void pack(const at::Tensor& tensor) {
    const std::size_t index = packed_++;
    if (index >= tensors_.size()) {
      return;  // the checkpointed function caught StopRecomputation and continued
    }
    const Frame::Saved& saved = frame_.saved_[index];
    saved.tensor.check(tensor, index);
    // The tensor is not needed if the graph node that saved the tensor in forward was freed.
    if (saved.needed) {
      tensors_[index].emplace(tensor);
    }
    if (packed_ == tensors_.size()) {
      throw StopRecomputation{};
    }
  }
  void finish() {
    TESSERA_CHECK(packed_ >= tensors_.size(), "checkpoint: the recomputation saved ", packed_,
                  " tensors for backward, but the forward saved ", tensors_.size(),
                  "; the checkpointed function must do the same both times");
  }
  RecomputedTensors take() { return std::move(tensors_); }

  std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() override {
    return std::make_unique<Kept>(*this);
  }
  bool replays() const override { return true; }
  std::uint64_t replay_count() override {
    TESSERA_CHECK(next_count_ < frame_.counts_.size(),
                  "checkpoint: the recomputation makes more calls (for example of dropout) than "
                  "the forward, which made ",
                  frame_.counts_.size(), "; the checkpointed function must do the same both times");
    return frame_.counts_[next_count_++];
  }

 private:
  class Kept final : public tessera::detail::SavedVariableHooks {
   public:
    explicit Kept(Replay& replay) : replay_(replay) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.detach();
      replay_.pack(tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    Replay& replay_;
    at::Tensor tensor_;
  };

  Frame& frame_;
  RecomputedTensors tensors_;
  std::size_t packed_ = 0;
  std::size_t next_count_ = 0;
  std::optional<ReplayOperators> operators_;
  std::optional<OperatorModeScope> mode_;
};

RecomputedTensors Frame::recompute() {
  const std::vector<at::Tensor> inputs = unpack_inputs();
  // Unpacks the inputs before the thread's state is restored: unpacking can run the recomputation
  // of an outer region, and the recomputation changes the thread's state.
  const RestoredThread restored(thread_state_);
  Replay replay(*this);
  if (options_.counts != nullptr) {
    ++options_.counts->recomputations;
  }
  try {
    rerun_(inputs);
    replay.finish();
  } catch (const StopRecomputation&) {
  }
  return replay.take();
}

class CheckpointedForward final : public CheckpointedRegion {
 public:
  CheckpointedForward(std::shared_ptr<Frame> frame, std::span<at::Tensor* const> inputs)
      : frame_(std::move(frame)) {
    if (frame_->options().policy) {
      operators_.emplace(
          frame_->operators(), frame_->options(), [this] { return frame_->packed(); }, inputs);
      mode_.emplace(*operators_);
    }
  }
  void finish() { frame_->finish(); }

  std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() override {
    return std::make_unique<Placeholder>(frame_);
  }
  void record_count(std::uint64_t count) override { frame_->record_count(count); }

 private:
  /// Autograd saves a Placeholder in place of a tensor: a reference to the Frame, and the tensor's
  /// index in the Frame.
  class Placeholder final : public tessera::detail::SavedVariableHooks {
   public:
    explicit Placeholder(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
    ~Placeholder() override {
      if (index_) {
        // The graph node that would use the tensor was destroyed, so a recomputation need not store
        // the tensor.
        frame_->release(*index_);
      }
    }
    void call_pack_hook(const at::Tensor& tensor) override { index_ = frame_->pack(tensor); }
    at::Tensor call_unpack_hook() override { return frame_->unpack(index_.value()); }

   private:
    std::shared_ptr<Frame> frame_;
    std::optional<std::size_t> index_;
  };

  std::shared_ptr<Frame> frame_;
  std::optional<RecordOperators> operators_;
  std::optional<OperatorModeScope> mode_;
};

// Functions that autograd's engine calls, for checkpointed regions and for StandInGradient nodes.

namespace {

using tessera::detail::Edge;
using tessera::detail::variable_list;

/// Returns the innermost enclosing region that is a recomputation; nullptr if there is none.
CheckpointedRegion* nearest_replay() {
  CheckpointedRegion* region = innermost_here;
  while (region != nullptr && !region->replays()) {
    region = region->outer();
  }
  return region;
}

std::unique_ptr<tessera::detail::SavedVariableHooks> hooks_here() {
  return innermost_here == nullptr ? nullptr : innermost_here->hooks();
}

/// Runs a backward call: by StandInGradient::execute() if a StandInGradient is among the outputs of
/// the call, otherwise by `run`.
variable_list execute(const BackwardCall& call, const RunBackward& run) {
  for (const Edge& output : call.outputs) {
    if (auto* asked = dynamic_cast<StandInGradient*>(output.function.get())) {
      return asked->execute(call, run);
    }
  }
  return run(call);
}

bool installs_engine() {
  return tessera::detail::install_engine({.hooks = &hooks_here, .execute = &execute});
}

/// Installs the hooks in autograd's engine, once per process. Throws Error if the engine is not
/// libtorch's own: Python's engine would not call the hooks.
void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    TESSERA_CHECK(installs_engine(),
                  "activation checkpointing needs its own autograd engine, but this process has "
                  "already replaced libtorch's (Python does); use Python's checkpointing instead");
  });
}

}  // namespace

CheckpointedRegionScope::CheckpointedRegionScope(const CheckpointOptions& options,
                                                 std::span<at::Tensor* const> inputs, Rerun rerun) {
  // Without gradient recording autograd saves no tensors, so no region is needed.
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  install_engine();
  if (options.counts != nullptr) {
    ++options.counts->regions;
  }
  forward_ = std::make_unique<CheckpointedForward>(
      std::make_shared<Frame>(options, inputs, std::move(rerun)), inputs);
}

CheckpointedRegionScope::~CheckpointedRegionScope() = default;

void CheckpointedRegionScope::finish() {
  if (forward_ != nullptr) {
    forward_->finish();
  }
}

}  // namespace tessera::nn::detail

namespace tessera::nn {

void ask_stand_ins() {
  static std::once_flag once;
  std::call_once(once, [] { detail::installs_engine(); });
}

bool is_recomputing() {
  return detail::nearest_replay() != nullptr;
}

std::uint64_t replayed_count(std::uint64_t& counter) {
  detail::CheckpointedRegion* replay = detail::nearest_replay();
  const std::uint64_t count = replay != nullptr ? replay->replay_count() : counter++;
  // Nested checkpointed regions also record `count`, for their own recomputation.
  for (auto* region = detail::innermost_here; region != replay; region = region->outer()) {
    region->record_count(count);
  }
  return count;
}

}  // namespace tessera::nn
