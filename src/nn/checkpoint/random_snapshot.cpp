#include "random_snapshot.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace tessera::nn::detail {
namespace {

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

}  // namespace tessera::nn::detail
