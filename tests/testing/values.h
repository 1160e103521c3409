#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <c10/util/accumulate.h>

namespace tessera::testing {

/// A tensor of doubles in (-1, 1) without symmetries: element i is sin(1.7 i + seed).
inline at::Tensor values(at::IntArrayRef sizes, int seed = 0) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble).mul(1.7).add(seed))
      .view(sizes);
}

}  // namespace tessera::testing
