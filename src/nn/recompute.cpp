// The recomputation of an activation-checkpointed function.

#include "recompute.h"

#include <ATen/Context.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/engine.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::nn::detail {

// The state of the forward that a recomputation restores, apart from the inputs: the thread's modes
// and its random generators. It must be restored because backward runs on other threads and in
// other modes.

namespace {

/// The state of a generator. Locks the generator, as libtorch requires, because threads share it.
at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// Compares two generator states, which are byte tensors on the CPU.
bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::vector<c10::Device> devices_of(std::span<at::Tensor* const> tensors) {
  // The CPU is always included, because a function may draw random numbers on the CPU, whatever
  // device its inputs are on.
  std::vector<c10::Device> devices{c10::Device(c10::kCPU)};
  for (const at::Tensor* tensor : tensors) {
    const bool draws = tensor->defined() && tensor->is_cuda();
    if (draws && std::find(devices.begin(), devices.end(), tensor->device()) == devices.end()) {
      devices.push_back(tensor->device());
    }
  }
  return devices;
}

}  // namespace

RandomSnapshot::RandomSnapshot(std::span<at::Tensor* const> tensors) {
  for (const c10::Device device : devices_of(tensors)) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    states_.push_back({generator, state_of(generator)});
  }
}

RandomSnapshot RandomSnapshot::retaken() const {
  RandomSnapshot now;
  for (const State& state : states_) {
    now.states_.push_back({state.generator, state_of(state.generator)});
  }
  return now;
}

void RandomSnapshot::restore() const {
  set_random_state(ours_);
  for (const State& state : states_) {
    at::Generator generator = state.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state.value);
  }
}

void RandomSnapshot::forget_unmoved() {
  std::erase_if(states_, [](const State& state) {
    return equal_bytes(state.value, state_of(state.generator));
  });
}

ThreadState::ThreadState(std::span<at::Tensor* const> inputs, bool with_random_state)
    : keys_(tessera::detail::keys_of_thread()),
      strict_(is_strict()),
      replicates_plain_(plain_tensors_are_replicated()),
      region_(tessera::detail::random_region()),
      autocast_(tessera::detail::autocast_state()) {
  if (with_random_state) {
    random_.emplace(inputs);
  }
}

void ThreadState::settle() {
  if (random_) {
    random_->forget_unmoved();
  }
}

ThreadState::Restored::Restored(const ThreadState& then)
    : grad_mode_(true),
      keys_(then.keys_),
      strict_(then.strict_),
      replication_(then.replicates_plain_),
      region_(then.region_, /*replays=*/true),
      autocast_(tessera::detail::autocast_state()) {
  // The cache of casts is off, because nothing would clear it before the optimizer changes the
  // weights.
  tessera::detail::set_autocast_state({then.autocast_.types, /*keeps_casts=*/false});
  if (then.random_) {
    random_.emplace(then.random_->retaken());
    then.random_->restore();
  }
}

ThreadState::Restored::~Restored() {
  if (random_) {
    random_->restore();
  }
  tessera::detail::set_autocast_state(autocast_);
}

// Selective activation checkpointing: forward saves the results of the operators that a policy
// names, and the recomputation returns these results. A call is identified by its operator and its
// number, because the recomputation makes the same calls in the same order.

namespace {

using tessera::local_tensor;

using Results = OperatorMode::Results;

/// An alias of the tensor without autograd state, because autograd attaches new state to every
/// result.
at::Tensor unrecorded(const at::Tensor& tensor) {
  return tessera::detail::alias_tensor(tensor, /*allows_change=*/false);
}

Results unrecorded_all(const Results& results) {
  Results copies;
  copies.reserve(results.size());
  for (const c10::IValue& result : results) {
    copies.push_back(kernels::with_tensors(result, unrecorded));
  }
  return copies;
}

/// The version counter of each tensor in the results; numbers have no counter.
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

void OperatorLog::keep(const std::string& name, std::size_t index, const Results& results,
                       std::size_t packed, std::optional<RandomSnapshot> random_after) {
  kept_[name][index] = {unrecorded_all(results), versions_of(results), packed,
                        std::move(random_after)};
}

void OperatorLog::watch_aliases(const Results& results) {
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

void OperatorLog::forget_after(std::size_t packed) {
  for (auto& [name, calls] : kept_) {
    std::erase_if(calls, [&](const auto& call) { return call.second.packed == packed; });
  }
}

std::optional<Results> OperatorLog::replay(const std::string& name, std::size_t index, bool last) {
  auto& calls = kept_[name];
  const auto found = calls.find(index);
  if (found == calls.end()) {
    return std::nullopt;
  }
  const Kept& kept = found->second;
  TESSERA_CHECK(versions_of(kept.results) == kept.versions, "checkpoint: the result of ", name,
                ", call ", index,
                " of its region, was saved and then modified in place; let the "
                "policy recompute it, or write to a copy");
  if (kept.random_after) {
    // Sets the state of the generators, because the operator does not run again and does not
    // advance them; otherwise later operators would draw other numbers.
    kept.random_after->restore();
  }
  Results results = unrecorded_all(kept.results);
  // Frees the results if this is their last use: without retain_graph there is no other backward.
  if (last) {
    calls.erase(found);
  }
  return results;
}

RecordOperators::RecordOperators(OperatorLog& log, const CheckpointOptions& options,
                                 std::function<std::size_t()> packed,
                                 std::span<at::Tensor* const> inputs)
    : log_(log), options_(options), packed_(std::move(packed)) {
  if (options.preserve_rng_state) {
    random_.emplace(inputs);
  }
}

Results RecordOperators::call(const Operator& op, const std::function<Results()>& run) {
  Results results = call_next(outer_, op, run);
  const std::size_t index = calls_[op.name]++;
  if (options_.policy({op.name, index}) == SavePolicy::kMustSave) {
    std::optional<RandomSnapshot> after;
    if (op.draws_random && random_) {
      after.emplace(random_->retaken());
    }
    log_.keep(op.name, index, results, packed_(), std::move(after));
    if (options_.counts != nullptr) {
      ++options_.counts->kept_operators;
    }
  } else if (op.name == "aten::_unsafe_view") {
    // For the last view that matmul makes, which libtorch does not mark as a view.
    log_.watch_aliases(results);
  }
  return results;
}

/// The operator mode in a recomputation: returns the saved results.
class ReplayOperators final : public OperatorMode {
 public:
  ReplayOperators(OperatorLog& log, CheckpointCounts* counts) : log_(log), counts_(counts) {}
  Results call(const Operator& op, const std::function<Results()>& run) override {
    // True unless this backward retains its graph, which would permit another backward.
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

// One forward of a checkpointed function: the data that it saved, and how to run the function
// again. Autograd saves placeholders that refer to this object, the frame. The first placeholder
// that backward unpacks triggers the recomputation of all tensors.

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : sizes_(tensor.sizes().vec()), dtype_(tensor.scalar_type()), device_(tensor.device()) {
  // Compares layouts too: sizes() are global, so two different shards would look equal without the
  // layout.
  if (tessera::is_distributed(tensor)) {
    sharding_ = sharding_spec(tensor);
  }
}

std::string SavedTensor::text() const {
  std::ostringstream text;
  text << dtype_ << c10::IntArrayRef(sizes_) << " on " << device_;
  if (sharding_) {
    text << ", layout " << to_string(*sharding_->layout);
  }
  return text.str();
}

void SavedTensor::check(const at::Tensor& again, std::size_t index) const {
  const SavedTensor found(again);
  TESSERA_CHECK(found == *this, "checkpoint: the recomputation saved tensor ", index,
                " for backward as ", found.text(), ", but the forward saved it as ", text(),
                "; the checkpointed function must do the same both times: let it depend on its "
                "arguments, parameters and random numbers only");
}

const at::Tensor& RecomputedTensor::get() const {
  TESSERA_CHECK(tensor_._version() == version_, "checkpoint: a tensor of sizes ", tensor_.sizes(),
                " that backward needs was modified in place after it was saved; write to a copy");
  return tensor_;
}

Frame::Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun)
    : options_(options),
      thread_state_(inputs, options.preserve_rng_state),
      rerun_(std::move(rerun)) {
  for (const at::Tensor* input : inputs) {
    inputs_.emplace_back(*input, /*is_output=*/false);
  }
}

std::size_t Frame::pack(const at::Tensor& tensor) {
  saved_.emplace_back(tensor);
  if (options_.counts != nullptr) {
    ++options_.counts->packed;
  }
  return saved_.size() - 1;
}

void Frame::finish() {
  finished_ = true;
  thread_state_.settle();
  if (options_.early_stop) {
    operators_.forget_after(packed());
  }
}

at::Tensor Frame::unpack(std::size_t index) {
  const std::lock_guard lock(mutex_);
  const int graph_task = tessera::detail::backward_id();
  // Refused outside of a backward, because no event would end the lifetime of the other recomputed
  // tensors.
  if (graph_task < 0) {
    return recompute()[index]->get();
  }
  // Recomputed tensors are stored for each backward, because two backwards may run over one graph
  // (retain_graph), even concurrently.
  const auto [run, is_new] = recomputed_.try_emplace(graph_task);
  if (is_new) {
    forget_after_backward(graph_task);
  }
  RecomputedTensors& tensors = run->second;
  // Recomputes again if a node unpacks a tensor for the second time.
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
    // Each input becomes a new leaf, so that the graph of the recomputation is not connected to the
    // graph of the running backward.
    inputs.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad())
                                     : input);
  }
  return inputs;
}

/// Thrown to leave a recomputation that has all needed tensors. It is not a std::exception, so that
/// handlers in the function do not catch it.
struct StopRecomputation {};

/// The recomputation of a frame, as a scope. The function runs as in forward, with autograd on.
/// Autograd saves the same tensors in the same order as in forward, which identifies them. The
/// graph of the recomputation is discarded.
class Replay final : public CheckpointedRegion {
 public:
  explicit Replay(Frame& frame) : frame_(frame), tensors_(frame.packed()) {
    if (frame.options().policy) {
      operators_.emplace(frame.operators(), frame.options().counts.get());
      mode_.emplace(*operators_);
    }
  }

  /// Stores the next tensor that autograd saves. Throws StopRecomputation after the last needed
  /// tensor.
  void pack(const at::Tensor& tensor) {
    const std::size_t index = packed_++;
    // The recomputation saves more tensors than the forward. This is allowed only for a backward
    // inside the forward, while the forward has not saved all of its tensors.
    if (index >= tensors_.size()) {
      TESSERA_CHECK(
          !frame_.finished_ || !frame_.options().check_determinism,
          "checkpoint: the recomputation saves more tensors for backward than the forward, "
          "which saved ",
          tensors_.size(), "; the checkpointed function must do the same both times");
      return;
    }
    const Frame::Saved& saved = frame_.saved_[index];
    if (frame_.options().check_determinism) {
      saved.tensor.check(tensor, index);
    }
    // Does not store the tensor if the node that saved it has been freed.
    if (saved.needed) {
      tensors_[index].emplace(tensor);
    }
    if (frame_.options().early_stop && packed_ == tensors_.size()) {
      throw StopRecomputation{};
    }
  }
  /// Must be called when the function has returned. Throws Error if the function saved too few
  /// tensors.
  void finish() {
    TESSERA_CHECK(packed_ >= tensors_.size(), "checkpoint: the recomputation saved ", packed_,
                  " tensors for backward, but the forward saved ", tensors_.size(),
                  "; the checkpointed function must do the same both times");
  }
  RecomputedTensors take() { return std::move(tensors_); }

  std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() override;
  bool replays() const override { return true; }
  std::uint64_t replay_count() override {
    TESSERA_CHECK(next_count_ < frame_.counts_.size(),
                  "checkpoint: the recomputation counts more calls (of dropout, say) than the "
                  "forward, which counted ",
                  frame_.counts_.size(), "; the checkpointed function must do the same both times");
    return frame_.counts_[next_count_++];
  }
  void record_count(std::uint64_t) override {}

 private:
  Frame& frame_;
  RecomputedTensors tensors_;
  // How much of the forward's records the recomputation has read: number of saved tensors, and
  // number of counts.
  std::size_t packed_ = 0;
  std::size_t next_count_ = 0;
  std::optional<ReplayOperators> operators_;
  std::optional<OperatorModeScope> mode_;
};

namespace {

/// A saved tensor of the recomputation. Backward never uses the graph of the recomputation, so this
/// class simply stores the tensor.
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

}  // namespace

std::unique_ptr<tessera::detail::SavedVariableHooks> Replay::hooks() {
  return std::make_unique<Kept>(*this);
}

RecomputedTensors Frame::recompute() {
  const std::vector<at::Tensor> inputs = unpack_inputs();
  // The inputs are unpacked before the state is restored, because unpacking may run an outer
  // region's recomputation in its own state.
  const ThreadState::Restored restored(thread_state_);
  Replay replay(*this);
  CheckpointCounts* counts = options_.counts.get();
  if (counts != nullptr) {
    ++counts->recomputations;
  }
  try {
    rerun_(inputs);
    replay.finish();
    // All needed tensors exist, so the rest of the function need not run.
  } catch (const StopRecomputation&) {
    if (counts != nullptr) {
      ++counts->early_stops;
    }
  }
  RecomputedTensors tensors = replay.take();
  if (counts != nullptr) {
    counts->repacked += std::ranges::count_if(tensors, [](const auto& t) { return t.has_value(); });
  }
  return tensors;
}

}  // namespace tessera::nn::detail

namespace tessera::nn {

// The checkpointed regions of each thread, and their hooks in autograd's engine.

namespace detail {
namespace {

using tessera::detail::BackwardCall;
using tessera::detail::Edge;
using tessera::detail::RunBackward;
using tessera::detail::variable_list;

// Each thread has its own list of regions, because backward recomputes on autograd's threads.
thread_local CheckpointedRegion* innermost_here = nullptr;

/// The innermost region that is a recomputation. Regions inside it use the counts that its forward
/// recorded.
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

/// Runs a backward call. If a StandInGradient is among the outputs, the stand-in runs the call.
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

}  // namespace

CheckpointedRegion::CheckpointedRegion() : outer_(std::exchange(innermost_here, this)) {}
CheckpointedRegion::~CheckpointedRegion() {
  innermost_here = outer_;
}
CheckpointedRegion* CheckpointedRegion::innermost() {
  return innermost_here;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Checked because the hooks would not be called if Python's engine had replaced libtorch's
    // engine.
    TESSERA_CHECK(installs_engine(),
                  "activation checkpointing needs its own autograd engine, but this process "
                  "has replaced libtorch's already (Python does); checkpoint there instead");
  });
}

}  // namespace detail

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
  // Regions inside the recomputation record the count too, for their own recomputations.
  for (auto* region = detail::CheckpointedRegion::innermost(); region != replay;
       region = region->outer()) {
    region->record_count(count);
  }
  return count;
}

}  // namespace tessera::nn
