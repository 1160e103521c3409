#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/random.h"

namespace tessera::nn {

// Fused operations on plain or distributed tensors. On distributed ones they work on the local
// tensors and never communicate in forward; what they cannot do so is refused with Error. A
// gradient that arrives with another layout than the result's is redistributed first.
// Differentiable once.

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32 (fp64 for fp64),
/// rounded once. weight: (last size) or undefined. The last dimension of x must be whole, weight
/// replicated on x's mesh. Gradient of weight: Partial over the mesh dimensions that split x.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// silu(gate) * up, the inner part of SwiGLU (Shazeer 2020). Same shape, type and layout.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

/// Rotary position embedding (Su et al. 2021), Hugging Face's half-split convention:
/// x * cos + rotate_half(x) * sin. x: (batch, sequence, heads, head_dim), head_dim even; cos, sin:
/// (sequence, head_dim) plain, without gradient. Of a distributed x, batch and heads may be split.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Rows `indices` of `weight`. indices: any shape, int64, plain (the same on every rank of the
/// weight's mesh) or on the weight's mesh. Per mesh dimension: weight Shard(0) gives Partial,
/// weight Shard(1) gives Shard(-1), indices Shard(d) with a replicated weight give Shard(d); other
/// combinations are refused. The gradient of weight has weight's layout, and is Partial where
/// the indices were split. An index out of range is an Error on CPU.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

/// Zeroes each element with probability p, by `key` and its place in the global tensor, and scales
/// the others by 1/(1-p). The mask is drawn again in backward rather than kept.
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key);

}  // namespace tessera::nn
