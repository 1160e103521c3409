#pragma once

#include <ATen/ops/allclose.h>

#include <cstddef>

#include "tessera/tessera.hpp"

/// Throws Error unless the gradients of `split` equal those of `whole`, the same model on one rank.
/// Collective.
inline void expect_gradients(const tessera::nn::ModuleBase& split,
                             const tessera::nn::ModuleBase& whole) {
  const auto found = split.named_slots();
  const auto expected = whole.named_slots();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const tessera::DistributedTensor grad(found[i].second->persistent().grad());
    TESSERA_CHECK(
        at::allclose(grad.full_tensor(), expected[i].second->persistent().grad(), 1e-4, 1e-5),
        "the gradient of ", found[i].first, " is wrong");
  }
}
