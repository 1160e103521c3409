// One forward of a checkpointed function: what it saved, and how to run it again. Autograd holds
// placeholders that point to the frame; the first one that backward opens recomputes all of them.
// What the recomputation itself does is in replay.cpp.

#include "recompute/frame.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "recompute/replay.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/backward.h"

namespace tessera::nn::detail {

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : sizes_(tensor.sizes().vec()), dtype_(tensor.scalar_type()), device_(tensor.device()) {
  // sizes() are global: without the layout two different shards would look alike.
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
    // Early stop ends the recomputation at the last saved tensor: later results would never be
    // asked for.
    operators_.forget_after(packed());
  }
}

at::Tensor Frame::unpack(std::size_t index) {
  const std::lock_guard lock(mutex_);
  const int graph_task = tessera::detail::backward_id();
  // Outside of a backward (code that inspects the graph) nothing says how long to keep the other
  // tensors, so they are not kept.
  if (graph_task < 0) {
    return recompute()[index]->get();
  }
  // One set for each backward: two may run over one graph (retain_graph), even at a time.
  const auto [run, is_new] = recomputed_.try_emplace(graph_task);
  if (is_new) {
    forget_after_backward(graph_task);
  }
  RecomputedTensors& tensors = run->second;
  // A tensor is given away once, to free memory early; a node that asks twice has it recomputed.
  if (tensors.empty() || !tensors[index]) {
    tensors = recompute();
  }
  return std::exchange(tensors[index], std::nullopt)->get();
}

void Frame::forget_after_backward(int graph_task) {
  // Weak: the callback must not keep a graph alive that was freed within the backward.
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
    // A leaf, so that the recomputed graph does not reach into the one that backward walks.
    inputs.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad())
                                     : input);
  }
  return inputs;
}

RecomputedTensors Frame::recompute() {
  const std::vector<at::Tensor> inputs = unpack_inputs();
  // After the inputs were unpacked, which may run an outer region's recomputation in its own state.
  const ThreadState::Restored restored(thread_state_);
  Replay replay(*this);
  CheckpointCounts* counts = options_.counts.get();
  if (counts != nullptr) {
    ++counts->recomputations;
  }
  try {
    rerun_(inputs);
    replay.finish();
    // All that is needed has been made; the rest of the function is not run.
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
