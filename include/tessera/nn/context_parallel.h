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

/// Options of context-parallel attention: which keys a query sees.
struct ContextAttentionOptions {
  bool causal = true;
  std::int64_t window = 0;  ///< number of positions that a query sees, including its own; 0: all
                            ///< positions. Requires `causal`.
  /// A mask for nn::attention(), used instead of `causal` and `window`. The rows of the mask are
  /// this rank's queries, and the columns are the keys of the whole sequence: (tokens, sequence),
  /// optionally with leading dimensions for batch and heads (or 1). With a mask all query-key pairs
  /// are computed.
  at::Tensor mask{};
  /// The documents of the whole sequences: a query sees only keys of its own document. nullptr if
  /// sequences have no documents. Documents require `causal` and no mask.
  DocumentsPtr documents{};
};

/// Context parallelism: sequences are split over a mesh dimension of n ranks. Each rank runs the
/// whole model on its own tokens. Only attention needs the keys and values of other ranks, and
/// gathers them. A sequence is 2n chunks of equal length. Rank r has chunk r followed by chunk 2n -
/// 1 - r, so that under a causal mask all ranks compute the same number of query-key pairs. See
/// Dubey et al. 2024 (Llama 3), section 3.3.2. PyTorch's context_parallel calls it head-tail load
/// balancing.
///
/// The model passes one ContextParallel object to attention(), or to nn::Attention in
/// AttentionInputs. Tensors that depend on positions, such as rotary tables, are split by shard()
/// or looked up by positions(). The parameters' gradients are sums over the ranks: apply
/// fully_shard to this mesh dimension too, flattened with the data-parallel dimension
/// (docs/context_parallel.md).
///
/// Thread safety: one thread at a time.
class ContextParallel {
 public:
  /// `mesh`: the 1-D mesh of the context-parallel ranks. Not collective. Throws Error if `mesh` is
  /// not 1-D.
  explicit ContextParallel(DeviceMesh mesh);

  const DeviceMesh& mesh() const { return mesh_; }

  /// Positions of this rank's tokens in a sequence of `sequence` tokens: (sequence / n) int64.
  /// positions(), shard() and unshard() throw Error unless 2n divides the sequence length. Not
  /// collective.
  at::Tensor positions(std::int64_t sequence, c10::Device device) const;
  /// Returns this rank's part of `whole`, which is split along `dim`. Not collective. Backward
  /// writes the gradient of this rank's part only. PyTorch's _context_parallel_shard.
  at::Tensor shard(const at::Tensor& whole, std::int64_t dim) const;
  /// Gathers the whole tensor, in the order of positions, from equal parts along `dim` on all
  /// ranks. Collective. Gradient: the sum over all ranks of the gradients of the whole tensor;
  /// differentiable once. PyTorch's context_parallel_unshard.
  at::Tensor unshard(const at::Tensor& part, std::int64_t dim) const;

  /// Computes attention of this rank's queries with the keys and values of the whole sequence. q:
  /// (batch, heads, tokens, width). k, v: like q, with a number of heads that divides the heads of
  /// q. The result has the sizes of q. Tensors are plain, or distributed over another mesh and
  /// sharded by batch and heads only (with documents by heads only). Collective: one all-gather of
  /// keys and values in forward, one reduce-scatter of their gradients in backward. Differentiable
  /// once. Without `mask`, each chunk needs two kernel calls: a call with the keys before the
  /// chunk, and a causal call with the chunk's own keys. The results of the two calls are merged by
  /// log-sum-exp, so that no mask tensor is needed. A window needs a mask of fewer than (2 * chunk
  /// length)^2 elements. With documents, each document's part of a chunk is computed in the same
  /// way. Throws Error for an odd number of tokens, and if the documents' sizes do not match.
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const ContextAttentionOptions& options = {});

 private:
  /// A range of consecutive positions of a sequence.
  struct Chunk {
    std::int64_t first, length;
  };
  std::array<Chunk, 2> chunks(std::int64_t sequence) const;

  DeviceMesh mesh_;
};
/// A shared pointer, because a model and its attention layers use one ContextParallel object.
using ContextParallelPtr = std::shared_ptr<ContextParallel>;

}  // namespace tessera::nn
TESSERA_API_END
