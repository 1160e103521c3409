#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <c10/util/accumulate.h>

namespace tessera::testing {

// Inputs of tests. Each depends on the sizes and the seed only, so that all ranks make the same.

/// 0, 1, 2, ... in the order of the elements.
inline at::Tensor counting_values(at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  return at::arange(c10::multiply_integers(sizes), type).view(sizes);
}

/// Doubles in (-1, 1) without symmetries: element i is sin(1.7 i + seed).
inline at::Tensor values(at::IntArrayRef sizes, double seed = 0) {
  return at::sin(counting_values(sizes).mul(1.7).add(seed));
}

/// Irregular floats in (-scale, scale), evenly spread: a hash of the index.
inline at::Tensor uniform_values(at::IntArrayRef sizes, double seed, double scale = 1.0) {
  const at::Tensor hash = counting_values(sizes).mul(12.9898).add(seed).sin().mul(43758.5453);
  return hash.sub(hash.floor()).mul(2 * scale).sub(scale).to(at::kFloat);
}

/// Floats of the standard normal distribution.
inline at::Tensor normal_values(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

}  // namespace tessera::testing
