#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::nn {

// Fused operations on plain or distributed tensors. Each function calls an operator of this library
// ("tessera::rms_norm" and so on) with a sharding rule. An operation communicates if its rule
// redistributes an argument; a StrictScope refuses such communication. In backward, a gradient
// whose layout differs from the layout of the function's result is redistributed first, which is
// collective. Differentiable once: create_graph throws Error.

/// Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).
/// Statistics are computed in fp32 (fp64 for fp64); the result is rounded once. weight:
/// (x.size(-1)) or undefined. Every dimension of x except the last may be sharded. The gradient of
/// weight is Partial over the mesh dimensions that shard x.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Returns rms_norm(x + residual) and x + residual, bit-equal to separate calls for the sum and the
/// norm. The gradients are computed in one pass. x and the results may have the layouts that
/// rms_norm() supports. Partial inputs are reduced. Broadcasting and type promotion are those of
/// the addition.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);

/// Returns silu(gate) * up, the activation of SwiGLU (Shazeer 2020). `gate` and `up` have the same
/// shape and type. Any dimension may be sharded.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

/// Applies rotary position embedding (Su et al. 2021), in Hugging Face's half-split convention: x *
/// cos + rotate_half(x) * sin. x: (batch, sequence, heads, head_dim), head_dim even; cos, sin:
/// (sequence, head_dim), without gradient. Every dimension of x except the last may be sharded;
/// each rank uses the rows of the tables for its own positions.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
/// Applies rotary_embedding() to queries and keys, whose numbers of heads can differ. On CUDA one
/// kernel computes both results.
std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin);

/// Looks up the rows `indices` (int64) of `weight`: (...) -> (..., weight.size(1)). Along each mesh
/// dimension, a weight with Shard(0) gives a Partial result, a weight with Shard(1) a result with
/// Shard(-1), and indices with Shard(d) and a replicated weight a result with Shard(d). If both
/// weight and indices are sharded, one of the two is gathered. The gradient of weight has the
/// layout of weight, but is Partial over mesh dimensions that shard the indices. On a CPU, throws
/// Error for an index out of range.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

/// Zeroes each element with probability p and multiplies the other elements by 1/(1-p). The mask
/// depends on `key` and the element's index in the global tensor; backward recomputes the mask. In
/// the forward of a model with fully_shard, the global tensor includes the batch rows of all
/// data-parallel ranks. Throws Error for a plain tensor whose position in the global tensor is
/// unknown (docs/random.md).
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key);

// Attention by a libtorch kernel. Arguments are plain tensors, or distributed tensors that are
// sharded by batch or by heads. The functions do not communicate.

/// Computes softmax(q k^T / sqrt(width)) v with libtorch's kernels, causal or not. q: (batch,
/// heads, tokens, width). k, v: like q, with as many heads or with fewer heads. If k and v have
/// fewer heads, several heads of q use one head of k and v. `mask`: (tokens of q, tokens of k),
/// optionally with leading dimensions for batch and heads (or 1). A bool mask is true where a query
/// sees a key; a mask of q's type is added to the scores. An undefined mask excludes no key. Throws
/// Error for `mask` together with `causal`.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask = {}, double dropout = 0);

/// allow_math_attention(true) permits PyTorch's "math" attention kernel in training on a GPU, for
/// all threads. Otherwise training with the math kernel throws Error, because the kernel is slow
/// and saves all scores. Attention with dropout on a GPU always uses the math kernel. A CPU accepts
/// every kernel.
using tessera::detail::allow_math_attention;

/// Returns the name of the kernel that attention() uses in training, for logs: "flash", "efficient,
/// key-value heads repeated". `options`: device and type of q, k and v. `heads`, `kv_heads`:
/// numbers of heads of one rank. `masked`: whether attention() gets a mask tensor instead of causal
/// = true. `packed`: whether attention has documents or a window. Allocates no memory.
std::string attention_kernel(const at::TensorOptions& options, std::int64_t heads,
                             std::int64_t kv_heads, std::int64_t tokens, std::int64_t width,
                             bool masked = false, bool packed = false);

namespace detail {

/// Boundaries of documents that are packed into sequences: the offsets that attention kernels need.
class DocumentOffsets {
 public:
  DocumentOffsets(const at::Tensor& positions, c10::Device device);

  /// Returns the index of the first token of each document, counted over all sequences, followed by
  /// the total number of tokens.
  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  /// Returns offsets() on the device as int32, the format of variable-length attention kernels.
  const at::Tensor& device_offsets() const { return device_offsets_; }
  std::vector<std::int64_t> lengths() const;
  /// Throws Error, with a message that begins with "attention", unless the Documents were made for
  /// `batch` sequences of `tokens` tokens.
  void check_sequences(std::int64_t batch, std::int64_t tokens) const;
  /// Returns the number of tokens in the longest document.
  std::int64_t longest() const { return longest_; }
  /// Whether each sequence is a single document, so that the causal flag alone is sufficient.
  bool are_sequences() const { return std::ssize(offsets_) <= batch_ + 1; }
  /// Returns the mask that is equivalent to the documents: (batch, 1, tokens, tokens), in the
  /// format of causal_mask(). Every call makes a new tensor.
  at::Tensor mask(std::int64_t window = 0) const;

 private:
  std::int64_t batch_, tokens_;
  std::vector<std::int64_t> offsets_;
  at::Tensor device_offsets_;
  std::int64_t longest_ = 0;
};

}  // namespace detail

/// Boundaries of documents that are packed into sequences: a token sees only its own document. The
/// offsets of documents replace a mask of (batch, tokens, tokens). All attention layers of a model
/// use one Documents object.
class Documents : public detail::DocumentOffsets {
 public:
  /// `positions`: (batch, tokens) int64, the position of each token in its document; position 0
  /// starts a document. The first token of a sequence always starts a document. The CPU reads
  /// `positions`; if `positions` is on a GPU, the CPU waits for the GPU. `device`: the device that
  /// computes attention.
  Documents(const at::Tensor& positions, c10::Device device)
      : detail::DocumentOffsets(positions, device) {}
};
/// Pointer to Documents. All attention layers share one Documents object.
using DocumentsPtr = std::shared_ptr<const Documents>;

namespace detail {

/// Options of causal_attention(): which keys a query sees, up to its own position.
struct CausalAttentionOptions {
  /// Number of positions that a query sees, including the query's own position; 0: all positions.
  std::int64_t window = 0;
  DocumentsPtr documents{};  ///< boundaries of packed documents; nullptr: whole sequences
  double dropout = 0;        ///< dropout probability; if > 0, `window` and `documents` use a mask
};

/// Computes causal attention, with an optional window and packed documents. q: (batch, heads,
/// tokens, width); k, v: like q, with a number of heads that divides the heads of q. The result has
/// the sizes of q. Tensors are plain, or distributed and sharded by heads only. Kernels:
///   GPU, fp16 or bf16: the flash kernel (Dao 2023), with variable lengths and a window
///   GPU, fp32, documents only: the memory-efficient kernel, with variable lengths
///   GPU, fp32, window only: one call per block of queries, with the keys in the block's window
///   CPU: one call per document; with a window, one call per block of queries as on a GPU
///   Other cases: one call with a mask
/// Throws Error if the sizes of keys, values or documents do not match q, or for a negative window.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options = {});

/// Returns a causal mask with a window: (tokens, tokens), true where a query sees a key. A query
/// sees at most `window` positions, including the query's own; 0: all earlier positions.
at::Tensor causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device);

/// Returns the name of a kernel that attention() uses, for logs.
std::string to_string(const tessera::detail::AttentionKernel& kernel);
/// Returns the kernel that causal_attention() uses with documents or a window, where attention
/// without them uses `kernel`: the flash kernel instead of cuDNN, otherwise `kernel`.
tessera::detail::AttentionKernel packed_kernel(tessera::detail::AttentionKernel kernel);

}  // namespace detail

/// Options of context-parallel attention: which keys a query sees. A window requires `causal`.
struct ContextAttentionOptions {
  bool causal = true;
  std::int64_t window = 0;  ///< number of positions that a query sees, including its own; 0: all
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
/// Dubey et al. 2024 (Llama 3), section 3.3.2. PyTorch's context_parallel calls this order
/// head-tail load balancing.
///
/// The model passes one ContextParallel object to attention(), or to nn::Attention in
/// AttentionInputs. Tensors that depend on positions, such as rotary tables, are split by shard()
/// or looked up by positions(). The ranks have different tokens, like data-parallel ranks: flatten
/// this mesh dimension with the data-parallel dimension, and call fully_shard on the flattened
/// dimension, which then reduces gradients over both (docs/context_parallel.md).
///
/// Thread safety: one thread at a time.
class ContextParallel {
 public:
  /// `mesh`: the 1-D mesh of the context-parallel ranks. Not collective. Throws Error if `mesh` is
  /// not 1-D.
  explicit ContextParallel(DeviceMesh mesh);

  const DeviceMesh& mesh() const { return mesh_; }

  /// Returns the positions of this rank's tokens in a sequence of `sequence` tokens: (sequence / n)
  /// int64. positions(), shard() and unshard() throw Error unless 2n divides the sequence length.
  /// Not collective.
  at::Tensor positions(std::int64_t sequence, c10::Device device) const;
  /// Returns this rank's shard of `whole`, which is split along `dim`. In backward, the gradient of
  /// `whole` is 0 outside of this shard. Not collective. Like PyTorch's _context_parallel_shard.
  at::Tensor shard(const at::Tensor& whole, std::int64_t dim) const;
  /// Gathers the shards of all ranks, which have equal sizes along `dim`, and returns the whole
  /// tensor in the order of positions. Collective. Backward sums the gradient of the whole tensor
  /// over all ranks; differentiable once. Like PyTorch's context_parallel_unshard.
  at::Tensor unshard(const at::Tensor& part, std::int64_t dim) const;

  /// Computes attention of this rank's queries with the keys and values of the whole sequence. q:
  /// (batch, heads, tokens, width). k, v: like q, with a number of heads that divides the heads of
  /// q. The result has the sizes of q. Tensors are plain, or distributed over another mesh and
  /// sharded by batch and heads only (with documents by heads only). Collective: one all-gather of
  /// keys and values in forward, one reduce-scatter of their gradients in backward. Differentiable
  /// once. Without `mask`, each chunk needs two kernel calls: a call with the keys before the
  /// chunk, and a causal call with the chunk's own keys. The results are merged by log-sum-exp,
  /// without a mask tensor. For a window, attention() makes a mask of fewer than (2 * chunk
  /// length)^2 elements. With documents, the two calls are made for each document in a chunk.
  /// Throws Error for an odd number of tokens, and for documents of other sizes than the whole
  /// sequences.
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
/// A shared pointer to a ContextParallel object, which a model and its attention layers use.
using ContextParallelPtr = std::shared_ptr<ContextParallel>;

}  // namespace tessera::nn
TESSERA_API_END
