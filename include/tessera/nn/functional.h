#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "tessera/dtensor/random.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

// Fused operations on plain or distributed tensors. Each function calls an operator of this library
// ("tessera::rms_norm" and so on) with a sharding rule. An operation communicates if its rule
// redistributes an argument; a StrictScope refuses such communication. In backward, a gradient
// whose layout differs from the result's is redistributed first, which is collective.
// Differentiable once: create_graph throws Error.

/// Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).
/// Statistics are computed in fp32 (fp64 for fp64); the result is rounded once. weight:
/// (x.size(-1)) or undefined. Every dimension of x except the last may be sharded. The gradient of
/// weight is Partial over the mesh dimensions that shard x.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Returns rms_norm(x + residual) and x + residual, bit-equal to two separate operations. The
/// gradients are computed in one pass. Layouts are the same as for rms_norm(). Partial inputs are
/// reduced. Broadcasting and type promotion are those of the addition.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);

/// Returns silu(gate) * up, the inner part of SwiGLU (Shazeer 2020). `gate` and `up` have the same
/// shape and type. Any dimension may be sharded.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

/// Applies rotary position embedding (Su et al. 2021), in Hugging Face's half-split convention: x *
/// cos + rotate_half(x) * sin. x: (batch, sequence, heads, head_dim), head_dim even; cos, sin:
/// (sequence, head_dim), without gradient. Every dimension of x except the last may be sharded;
/// each rank uses the rows of the tables for its own positions.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
/// Applies rotary_embedding() to queries and keys, which may have different numbers of heads. On
/// CUDA this is one kernel launch.
std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin);

/// Looks up the rows `indices` (int64) of `weight`: (...) -> (..., weight.size(1)). For each mesh
/// dimension: weight Shard(0) gives Partial, weight Shard(1) gives Shard(-1), indices Shard(d) with
/// a replicated weight give Shard(d). If weight and indices are both sharded on a mesh dimension,
/// one of the two is gathered. The gradient of weight has the layout of weight, but is Partial over
/// mesh dimensions that shard the indices. An index out of range is an Error on CPU.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

/// Zeroes each element with probability p and scales the others by 1/(1-p). The mask depends on
/// `key` and the element's index in the global tensor; backward recomputes it. In the forward of a
/// model with fully_shard, the global tensor includes the batch rows of all data-parallel ranks.
/// Throws Error for a plain tensor whose part of the global tensor is unknown (docs/random.md).
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key);

}  // namespace tessera::nn
TESSERA_API_END
