#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "tessera/dtensor/random.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

// Fused operations on plain or distributed tensors: operators of the library, "tessera::rms_norm"
// and so on, with a sharding rule each. They communicate where their rule has to bring an argument
// to another layout, which a StrictScope refuses. In backward, a gradient of another layout than
// the result's is redistributed first, which is collective. Differentiable once: create_graph
// throws Error.

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). Statistics
/// in fp32 (fp64 for fp64), rounded once. weight: (x.size(-1)) or undefined. Any dimension of x but
/// the last may be sharded. The gradient of weight is Partial over the mesh dimensions that shard
/// x.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// rms_norm(x + residual), and x + residual: the same bits as those two operations, and gradients
/// in one pass. On layouts as above; Partial inputs are reduced. Sizes that must be expanded and
/// types that differ are taken as the addition takes them.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);

/// silu(gate) * up, the inner part of SwiGLU (Shazeer 2020). Same shape and type; any dimension may
/// be sharded.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

/// Rotary position embedding (Su et al. 2021), Hugging Face's half-split convention:
/// x * cos + rotate_half(x) * sin. x: (batch, sequence, heads, head_dim), head_dim even; cos, sin:
/// (sequence, head_dim), without gradient. Any dimension of x but the last may be sharded; of the
/// tables each rank takes the positions that it has.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
/// The same of queries and keys at once, which may have other numbers of heads: on CUDA one launch.
std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin);

/// Rows `indices` of `weight`: (...) -> (..., weight.size(1)). indices: int64. For each mesh
/// dimension: weight Shard(0) gives Partial, weight Shard(1) gives Shard(-1), indices Shard(d)
/// with a replicated weight give Shard(d); of both sharded, one is gathered. The gradient of weight
/// has the layout of weight, but is Partial over mesh dimensions that shard the indices. An index
/// out of range is an Error on CPU.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

/// Zeroes each element with probability p and scales the others by 1/(1-p). The mask is a function
/// of `key` and the element's index in the global tensor (that of all data-parallel ranks in the
/// forward of a model with fully_shard); backward recomputes it. Throws Error for a plain tensor
/// whose part of the global tensor is unknown (docs/random.md).
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key);

}  // namespace tessera::nn
TESSERA_API_END
