#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/kernels/detail/cross_entropy.h"

/// Functions that call Tessera's operators ("tessera::silu_mul" and so on, src/dtensor/fused/) on
/// plain and distributed tensors. nn/functional.h documents the operators.
TESSERA_API_BEGIN
namespace tessera::detail {

using kernels::RowLosses;
using kernels::RowLossOptions;

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);
/// Returns dropout of x. Whether an element is dropped depends on the element's index in a global
/// tensor. `first_element`: the index of x's first element in the global tensor.
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key, std::int64_t first_element = 0);
/// Returns RMSNorm of x. An undefined `weight` stands for ones.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// Returns the pair (RMSNorm(x + residual), x + residual).
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);
/// Computes x weight^T in fp8 (kernels/detail/fused.h). Differentiable.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight);
at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight);
at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x);
at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
std::pair<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& cos, const at::Tensor& sin);
/// Returns the cross entropy of each row of the logits: a tensor (tokens), sharded like the rows of
/// the logits. Collective if the vocabulary is sharded (two all-reduces).
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const RowLossOptions& options = {});
/// Causal attention of several chunks of a sequence to the keys of the whole sequence. q: (batch,
/// heads, tokens, width), with chunks of equal length. k, v: (batch, kv heads, sequence, width).
/// `firsts`: the sequence position of each chunk's first token. `window`: the number of keys that a
/// query sees, including the key at the query's position; 0: all. `documents`:
/// nn::Documents::offsets(); a query sees only its own document.
at::Tensor chunked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             c10::IntArrayRef firsts, std::int64_t window = 0,
                             c10::IntArrayRef documents = {});

/// A tensor that an autograd node needs in backward. The result of an RMS norm or silu_mul is
/// recomputed in backward, once for all nodes and bit-equal (Korthikanti et al. 2022). The autograd
/// node of the norm or silu_mul saves the inputs anyway. The result is saved if written in place,
/// if inputs were redistributed, or while saved-tensor hooks are active. Other tensors are saved.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor);
  /// Returns the saved or recomputed tensor. `gradient`: the saved tensor's gradient for
  /// takes_gradient(), or undefined. Throws libtorch's errors if the tensor, or an input of the
  /// recomputation, was written in place or released.
  at::Tensor unpack(const at::Tensor& gradient = {}) const;
  /// Whether unpack(gradient) also runs the recomputed operator's backward on `gradient`.
  bool takes_gradient() const;
  /// Releases the saved tensor. The caller must know that no later backward runs the node that
  /// saved the tensor.
  void release() { saved_.reset_data(); }

 private:
  NodePtr<Node> maker_;  ///< the node that recomputes the tensor; nullptr: the tensor is saved
  SavedVariable saved_;
};

// The arithmetic of cross entropy on one rank's rows and columns of the logits. Used by
// tessera::cross_entropy and by linear_cross_entropy, which never has the whole logits.

/// Throws Error for cross-entropy options that are outside of their valid ranges.
void check_options(const RowLossOptions& options);
/// Throws Error unless the logits have the sizes (tokens, vocabulary) and the targets (tokens).
void check_loss_sizes(c10::IntArrayRef logits, c10::IntArrayRef targets);
/// Throws Error unless plain `targets` are int64, and in the vocabulary or ignored. Otherwise the
/// loss would silently lack a term. On a GPU the range check is a device assertion.
void check_targets(const at::Tensor& targets, std::int64_t vocabulary, std::int64_t ignore_index);

/// Redistributes `targets` to the sharding of the logits' rows, `rows`. `targets`: plain (equal on
/// every rank), or distributed on the same mesh. Collective if the layouts differ.
at::Tensor targets_of_rows(const at::Tensor& targets, const ShardingSpec& rows);

/// The columns of the logits (a range of the vocabulary) that this rank has.
struct VocabularyShard {
  std::int64_t vocabulary = 0;          ///< size of the whole vocabulary
  std::int64_t first_column = 0;        ///< index of this rank's first column of the logits
  comm::Communicator* group = nullptr;  ///< ranks that shard the vocabulary; nullptr: none
};

/// Whether each rank's shard of dimension `dim`, the vocabulary, is one contiguous range. A rank
/// needs one range to find the targets that are in its columns.
bool has_consecutive_columns(const ShardingSpec& spec, int dim);
void check_consecutive_columns(const ShardingSpec& spec, int dim);
/// Returns this rank's shard of dimension `dim` of `tensor`, the vocabulary. The first call is
/// collective (new process group). Throws Error if a rank's columns are not consecutive.
VocabularyShard vocabulary_shard(const at::Tensor& tensor, int dim);

/// Returns the losses of the rows of `logits` (tokens, this rank's columns) for `targets` (tokens).
/// Collective if `shard` has a process group: two all-reduces over the group.
RowLosses row_losses(const at::Tensor& logits, const at::Tensor& targets,
                     const VocabularyShard& shard, const RowLossOptions& options);
/// Like row_losses(), but writes the losses to `into`.
void write_row_losses(const at::Tensor& logits, const at::Tensor& targets,
                      const VocabularyShard& shard, const RowLossOptions& options,
                      const RowLosses& into);

/// Writes the gradient of `logits` to `gradient`. Both tensors have equal sizes and may be one
/// tensor. `of_row`: the gradient of each row's loss, (tokens) in loss_type(); if undefined, 1. Not
/// collective.
void write_logits_gradient(const at::Tensor& logits, const at::Tensor& targets,
                           const at::Tensor& log_sum_exp, const at::Tensor& of_row,
                           const VocabularyShard& shard, const RowLossOptions& options,
                           const at::Tensor& gradient);

}  // namespace tessera::detail
TESSERA_API_END
