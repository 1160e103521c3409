#include "frame.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "replay.h"

namespace tessera::nn::detail {

using torch::autograd::Engine;

Frame::Frame(const CheckpointOptions& options, std::span<at::Tensor* const> inputs, Rerun rerun)
    : options_(options),
      surroundings_(inputs, options.preserve_rng_state),
      rerun_(std::move(rerun)) {
  for (const at::Tensor* input : inputs) inputs_.emplace_back(*input, /*is_output=*/false);
}

std::size_t Frame::pack(const at::Tensor& tensor) {
  saved_.emplace_back(tensor);
  if (options_.counts != nullptr) ++options_.counts->packed;
  return saved_.size() - 1;
}

void Frame::finish() {
  finished_ = true;
  surroundings_.settle();
  if (options_.early_stop) operators_.forget_after(packed());
}

at::Tensor Frame::unpack(std::size_t index) {
  const std::lock_guard lock(mutex_);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  // Outside of a backward, somebody looks at the graph: nothing tells how long to keep the rest.
  if (graph_task < 0) return recompute()[index]->get();
  const auto [run, is_new] = recomputed_.try_emplace(graph_task);
  if (is_new) forget_after_backward(graph_task);
  RecomputedTensors& tensors = run->second;
  // Taken tensors are gone, to free memory; a node that asks twice pays for it.
  if (tensors.empty() || !tensors[index]) tensors = recompute();
  return std::exchange(tensors[index], std::nullopt)->get();
}

void Frame::forget_after_backward(int graph_task) {
  Engine::get_default_engine().queue_callback([frame = weak_from_this(), graph_task] {
    if (const std::shared_ptr<Frame> alive = frame.lock()) {
      const std::lock_guard lock(alive->mutex_);
      alive->recomputed_.erase(graph_task);
    }
  });
}

std::vector<at::Tensor> Frame::unpack_inputs() const {
  std::vector<at::Tensor> inputs;
  for (const torch::autograd::SavedVariable& saved : inputs_) {
    const at::Tensor input = saved.unpack();
    // A leaf: the recomputed graph must not reach into the one that backward walks.
    inputs.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad())
                                     : input);
  }
  return inputs;
}

RecomputedTensors Frame::recompute() {
  const std::vector<at::Tensor> inputs = unpack_inputs();
  const Surroundings::Restored restored(surroundings_);
  Replay replay(*this);
  CheckpointCounts* counts = options_.counts.get();
  if (counts != nullptr) ++counts->recomputations;
  try {
    rerun_(inputs);
    replay.finish();
  } catch (const StopRecomputation&) {
    if (counts != nullptr) ++counts->early_stops;
  }
  RecomputedTensors tensors = replay.take();
  if (counts != nullptr) {
    counts->repacked += std::ranges::count_if(tensors, [](const auto& t) { return t.has_value(); });
  }
  return tensors;
}

}  // namespace tessera::nn::detail
