#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/dtensor/random.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// In training, zeroes each element with probability p and scales the others by 1/(1-p).
///
/// The mask depends on the module's key (from init_weights, or set_key), the number of calls so far
/// and the element's place in the global tensor: it is the same on every mesh.
class Dropout : public Module<Dropout> {
 public:
  explicit Dropout(double p = 0.5);
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

  void set_key(RandomKey key) { key_ = key; }
  /// The next call's mask; set it back to replay a call. Activation checkpointing replays by
  /// itself.
  std::uint64_t calls() const { return calls_; }
  void set_calls(std::uint64_t calls) { calls_ = calls; }

 private:
  double p_;
  RandomKey key_;
  std::uint64_t calls_ = 0;
};

}  // namespace tessera::nn
