#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// What cross_entropy returns of the losses of the rows.
enum class Reduction { kMean, kSum, kNone };

/// What cross_entropy takes the loss of, and how.
struct CrossEntropyOptions {
  /// Rows with this target have no loss and no gradient.
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::kMean;
  /// What kMean divides the sum of the losses by: one number. Undefined: the number of rows that
  /// count here, at least 1, which is right if every data-parallel rank has as many.
  at::Tensor tokens = {};
  /// Instead of `tokens`: the data-parallel ranks, fully_shard's mesh. kMean is then the mean over
  /// all their rows that count, although the ranks have different numbers of them. They are counted
  /// in each call, by an all-reduce of one number. For micro-batches give `tokens`, of all of them.
  DeviceMesh over = {};
  /// This share of each target is spread over all columns, as torch's cross_entropy does. 0 to 1.
  double label_smoothing = 0;
  /// Adds z_loss * log(sum of exp(logits))^2 to each row's loss, which keeps the logits from
  /// drifting (PaLM, section 5).
  double z_loss = 0;
};

/// Cross-entropy in fp32 (fp64 for fp64 logits). `logits`: (tokens, vocabulary), plain, or
/// distributed on a mesh of any dimensions: the vocabulary sharded over some of them, the tokens
/// over others (uneven and empty shards too). `targets`: (tokens) int64: plain, the same on every
/// rank of that mesh; or distributed on it. The rows' losses are the operator
/// tessera::cross_entropy. Sharded vocabulary: two small all-reduces forward (row maximum; row sum
/// of exponentials together with the target's logit), none backward; the full logits are never
/// gathered. Megatron-LM's vocab-parallel cross-entropy. Sharded tokens: one all-reduce of the sum,
/// and one of the count if the targets are distributed so. Targets with another layout than the
/// rows of the logits are redistributed. Gradient: to `logits`, with their layout and type. Returns
/// a plain scalar over all tokens, equal on every rank of the mesh (0 if all targets are ignored),
/// or for kNone (tokens), distributed as the tokens are, else plain. Collective over the mesh where
/// anything is sharded. Throws Error for other shapes and types, logits that are Partial or where a
/// rank's columns are not consecutive, a target outside of the vocabulary, and, after a forward in
/// training of a model with fully_shard or replicate on several ranks, for ignored targets of a
/// mean without `tokens` or `over` that is to be differentiated; from backward, if it should be
/// differentiated itself.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

/// How many targets count, as the mean over the ranks of `mesh`: one fp64 number, > 0. As
/// CrossEntropyOptions::tokens it makes the mean over the ranks, which fully_shard takes of
/// gradients, the mean over all tokens that count. For micro-batches pass the targets of all of
/// them, and add the losses. Collective over `mesh`, the data-parallel dimensions. No gradient.
at::Tensor tokens_per_rank(const at::Tensor& targets, const DeviceMesh& mesh,
                           std::int64_t ignore_index = -100);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
