#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "tessera/dtensor/manual_seed.h"

namespace tessera::nn::detail {

/// Where random number generators stand: this thread's of tessera::manual_seed, and libtorch's of
/// the CPU and other devices.
class RandomSnapshot {
 public:
  /// Those of the CPU and of the devices of `tensors`.
  explicit RandomSnapshot(std::span<at::Tensor* const> tensors);

  /// The same generators as they stand now.
  RandomSnapshot retaken() const;
  void restore() const;
  /// Forgets libtorch's generators that stand where they stood: nobody drew from them, and they
  /// need no replay.
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

}  // namespace tessera::nn::detail
