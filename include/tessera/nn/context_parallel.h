#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/causal_attention.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The keys that a query of context-parallel attention sees.
struct ContextAttentionOptions {
  bool causal = true;
  std::int64_t window = 0;  ///< how many positions, its own included; 0: all. With causal only
  /// In place of both, as attention() takes it, for this rank's queries and the keys of the whole
  /// sequence: (tokens, sequence), or with a batch and heads (or 1) before these. All pairs
  /// are computed then.
  at::Tensor mask{};
  /// The documents of the whole sequences: a query sees its own document only. nullptr: none. With
  /// causal only, and without a mask.
  DocumentsPtr documents{};
};

/// Context parallelism: sequences are split over a mesh dimension of n ranks. Each computes all of
/// a model with its own tokens; attention alone needs other ranks' keys and values, which it
/// gathers. A sequence is 2n chunks of equal length. Rank r has chunk r and, after it, chunk
/// 2n - 1 - r: under a causal mask all ranks then compute the same number of query-key pairs.
/// Dubey et al. 2024 (Llama 3), section 3.3.2; the head-tail balance of PyTorch's context_parallel.
///
/// Where attention is computed, pass the object of the model to attention(), or to nn::Attention in
/// AttentionInputs. What depends on positions (rotary tables) is split by shard(), or looked up by
/// positions(). The parameters' gradients are sums over the ranks: apply fully_shard on the
/// dimension as on one of data, flattened with that of data (docs/context_parallel.md).
///
/// Thread safety: one thread at a time.
class ContextParallel {
 public:
  /// `mesh`: the dimension, 1-D. Not collective. Throws Error for another number of dimensions.
  explicit ContextParallel(DeviceMesh mesh);

  const DeviceMesh& mesh() const { return mesh_; }

  /// Positions of this rank's tokens in a sequence of `sequence` tokens: (sequence / n) int64.
  /// Throws Error unless 2n divides the sequence; so do the next two. Not collective.
  at::Tensor positions(std::int64_t sequence, c10::Device device) const;
  /// This rank's part of `whole`, which is split along `dim`. Not collective. Gradient: to its own
  /// part. PyTorch's _context_parallel_shard.
  at::Tensor shard(const at::Tensor& whole, std::int64_t dim) const;
  /// The whole tensor, in the order of positions, from all ranks' equal parts along `dim`.
  /// Collective. Gradient: the sum of all ranks' gradients of the whole; differentiable once.
  /// PyTorch's context_parallel_unshard.
  at::Tensor unshard(const at::Tensor& part, std::int64_t dim) const;

  /// attention() of this rank's queries with the keys and values of the whole sequence. q: (batch,
  /// heads, tokens, width); k, v: the same with as many heads, or fewer, which divide them; returns
  /// as q. Plain, or distributed over another mesh, split by batch and heads alone, with documents
  /// by heads alone. Collective: one
  /// all-gather of keys and values; in backward one reduce-scatter of their gradients.
  /// Differentiable once. Without `mask`, one call computes a chunk with the keys before it and
  /// another, causal one with its own keys; their results are merged by log-sum-exp, without a mask
  /// tensor. A window needs a mask of less than two chunks squared. Each document's part of a chunk
  /// is computed in the same way. Throws Error for an odd number of tokens, and for documents of
  /// other sizes.
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const ContextAttentionOptions& options = {});

 private:
  /// Consecutive positions.
  struct Chunk {
    std::int64_t first, length;
  };
  std::array<Chunk, 2> chunks(std::int64_t sequence) const;

  DeviceMesh mesh_;
};
/// Shared by a model and the calls of its attention.
using ContextParallelPtr = std::shared_ptr<ContextParallel>;

}  // namespace tessera::nn
TESSERA_API_END
