#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <exception>
#include <memory>
#include <string>

#include "tessera/nn/checkpoint.h"

namespace tessera::testing {

/// A leaf with irregular values in (-1, 1) that depend on the index and `seed`.
inline at::Tensor leaf(at::IntArrayRef sizes, double seed) {
  const at::Tensor index = at::arange(c10::multiply_integers(sizes), at::kDouble);
  const at::Tensor values = index.mul(12.9898).add(seed).sin().to(at::kFloat).view(sizes);
  return values.contiguous().requires_grad_();
}

/// Options whose counts a test reads.
struct Counted {
  nn::CheckpointOptions options{.counts = std::make_shared<nn::CheckpointCounts>()};
  const nn::CheckpointCounts* operator->() const { return options.counts.get(); }
};

/// What `run` throws, or nothing.
template <class Run>
std::string error_of(Run run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::testing
