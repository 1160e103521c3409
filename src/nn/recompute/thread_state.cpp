// The state that a recomputation shares with the forward, apart from its inputs: the thread's modes
// and its random numbers. Backward runs on other threads and in other modes, so all of it is set
// and restored.

#include "recompute/thread_state.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace tessera::nn::detail {
namespace {

/// Generators are shared by threads, and libtorch leaves the locking to its callers.
at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// States are byte tensors on the CPU.
bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::vector<c10::Device> devices_of(std::span<at::Tensor* const> tensors) {
  // The CPU's always: a function may draw there whatever its inputs are on.
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
    // A generator that was not used need not be set again.
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
  // Nothing would clear casts of weights that are kept before the optimizer changes them.
  tessera::detail::set_autocast_state({then.autocast_.types, /*keeps_casts=*/false});
  if (then.random_) {
    // The current state, to continue from after the recomputation.
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

}  // namespace tessera::nn::detail
