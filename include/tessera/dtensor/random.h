#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Counter-based random numbers (Philox4x32-10) indexed by global element: the value of an element
/// depends on `seed`, `stream` and its row-major index in the global tensor only, so the result is
/// bit-equal on every mesh, and on CPU and CUDA. Tensors may be plain or distributed (not partial).
/// `stream` tells tensors apart: give every parameter and every call its own.
/// Not collective. Gradient: none.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key);
void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key);
/// Normal cut to [low, high] by inverse CDF.
void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key);
/// 1 with probability `p`, else 0.
void bernoulli_(const at::Tensor& tensor, double p, RandomKey key);

/// A stable stream number for a name (FNV-1a), for example a parameter's FQN.
std::uint64_t stream_of(const char* name);

}  // namespace tessera
