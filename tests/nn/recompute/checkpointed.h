#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/nn/checkpoint.h"
#include "testing/values.h"

namespace tessera::testing {

inline at::Tensor leaf(at::IntArrayRef sizes, double seed) {
  return uniform_values(sizes, seed).requires_grad_();
}

/// Options whose counts a test reads.
struct Counted {
  nn::CheckpointOptions options{.counts = std::make_shared<nn::CheckpointCounts>()};
  const nn::CheckpointCounts* operator->() const { return options.counts.get(); }
};

}  // namespace tessera::testing
