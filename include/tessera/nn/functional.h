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

// Fused operations on plain or distributed tensors. Differentiable once. An operation communicates
// if its sharding rule redistributes an argument; a StrictScope forbids such communication.
// Backward redistributes a gradient whose layout differs from the result's layout; the
// redistribution is collective.

/// Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).
/// Statistics are in fp32 (fp64 for fp64). weight: (x.size(-1)) or undefined. Every dimension of x
/// except the last may be sharded; the gradient of weight is then Partial.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Returns rms_norm(x + residual) and x + residual, bit-equal to separate calls. x may have the
/// layouts that rms_norm() supports, or be Partial and is then reduced.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);

/// Returns silu(gate) * up, the activation of SwiGLU (Shazeer 2020). `gate` and `up` have the same
/// shape and type. Any dimension may be sharded.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

/// Applies rotary position embedding (Su et al. 2021), in Hugging Face's form: x * cos +
/// rotate_half(x) * sin. x: (batch, sequence, heads, head_dim); cos, sin: (sequence, head_dim),
/// without gradient. Every dimension of x except the last may be sharded.
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
/// Applies rotary_embedding() to queries and keys, whose numbers of heads can differ. On CUDA one
/// kernel computes both results.
std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin);

/// Looks up the rows `indices` (int64) of `weight`: (...) -> (..., weight.size(1)). A weight with
/// Shard(0) gives a Partial result; with Shard(1), a result with Shard(-1). Sharded indices give a
/// sharded result, and a Partial gradient of weight. On a CPU, throws Error for an index out of
/// range.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

/// Zeroes each element with probability p and multiplies the others by 1/(1-p). The mask depends on
/// `key` and the element's index in the global tensor. Throws Error for a plain tensor with unknown
/// global position (docs/random.md).
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key);

// Attention by a libtorch kernel. Arguments are plain tensors, or distributed tensors that are
// sharded by batch or by heads. The functions do not communicate.

/// Computes softmax(q k^T / sqrt(width)) v. q: (batch, heads, tokens, width). k, v: like q, or with
/// fewer heads. `mask`: (tokens of q, tokens of k), optionally with leading dimensions. A bool mask
/// is true where a query sees a key; other masks are added to the scores. Throws Error for `mask`
/// together with `causal`.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask = {}, double dropout = 0);

/// Sets, for all threads, whether training on a GPU may use PyTorch's "math" attention kernel.
/// Default: false, because the kernel is slow and saves all scores. Attention with dropout on a GPU
/// always uses the math kernel.
using tessera::detail::allow_math_attention;

/// Returns the name of the kernel that attention() uses in training, for logs. `options`: type and
/// device of q. `heads`, `kv_heads`: heads of one rank. `masked`: whether attention() gets a mask.
/// `packed`: whether attention() has documents or a window. Allocates no memory.
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

/// Boundaries of documents that are packed into sequences: a token sees only its own document.
/// Documents replace a mask of (batch, tokens, tokens). All attention layers use one Documents
/// object.
class Documents : public detail::DocumentOffsets {
 public:
  /// `positions`: (batch, tokens) int64, the position of each token in its document. Position 0
  /// starts a document, and so does a sequence. If `positions` is on a GPU, the CPU waits.
  /// `device`: the device that computes attention.
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
/// tokens, width); k, v: like q, or with fewer heads. Tensors are plain, or distributed and sharded
/// by heads only. Kernels:
///   GPU, fp16 or bf16: the flash kernel (Dao 2023), with variable lengths and a window
///   GPU, fp32, documents only: the memory-efficient kernel, with variable lengths
///   GPU, fp32, window only: one call per block of queries, with the keys in the block's window
///   CPU: one call per document; with a window, one call per block of queries as on a GPU
///   Other cases: one call with a mask
/// Throws Error for sizes that do not match q, or a negative window.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options = {});

/// Returns a causal mask, (tokens, tokens), true where a query sees a key. A query sees its own and
/// earlier positions, at most `window` in all; 0 means no window.
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
  /// A mask that replaces `causal` and `window`: (tokens of this rank, tokens of the whole
  /// sequence), optionally with leading dimensions for batch and heads (or 1).
  at::Tensor mask{};
  /// The documents of the whole sequences: a query sees only keys of its own document. nullptr if
  /// sequences have no documents. Documents require `causal` and no mask.
  DocumentsPtr documents{};
};

/// Context parallelism: n ranks split each sequence. Each rank runs the whole model on its own
/// tokens. Only attention gathers keys and values from other ranks.
///
/// A sequence has 2n chunks, and rank r has chunks r and 2n - 1 - r. All ranks then have the same
/// work under a causal mask (Dubey et al. 2024, section 3.3.2; PyTorch's head-tail load balancing).
///
/// Pass one ContextParallel object to attention(), or to nn::Attention in AttentionInputs. Split
/// rotary tables by shard() or positions(). Call fully_shard on the flattened data-parallel and
/// context-parallel dimensions (docs/context_parallel.md). Only one thread at a time may use the
/// object.
class ContextParallel {
 public:
  /// `mesh`: the 1-D mesh of the context-parallel ranks. Not collective. Throws Error if `mesh` is
  /// not 1-D.
  explicit ContextParallel(DeviceMesh mesh);

  const DeviceMesh& mesh() const { return mesh_; }

  /// Returns the positions of this rank's tokens, (sequence / n) int64. Not collective.
  /// positions(), shard() and unshard() throw Error unless 2n divides the sequence length.
  at::Tensor positions(std::int64_t sequence, c10::Device device) const;
  /// Returns this rank's shard of `whole`, which is split along `dim`. In backward, the gradient of
  /// `whole` is 0 outside of this shard. Not collective. Like PyTorch's _context_parallel_shard.
  at::Tensor shard(const at::Tensor& whole, std::int64_t dim) const;
  /// Returns the whole tensor from the shards of all ranks, in the order of positions. The shards
  /// must have equal sizes. Collective. Differentiable once. Like PyTorch's
  /// context_parallel_unshard.
  at::Tensor unshard(const at::Tensor& part, std::int64_t dim) const;

  /// Computes attention of this rank's queries to the whole sequence. q: (batch, heads, tokens,
  /// width). k, v: like q, or with fewer heads. Tensors are plain, or distributed over another mesh
  /// and sharded by batch and heads (with documents by heads only). Collective. Differentiable
  /// once.
  ///
  /// Without a mask, each chunk needs two kernel calls: one for the keys before the chunk, and one
  /// for the chunk's own keys. The results are merged by log-sum-exp. A window becomes a mask.
  ///
  /// Throws Error for an odd number of tokens, and for documents of other sizes.
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
