#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/layers.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Options of cross_entropy.
struct CrossEntropyOptions {
  /// A token whose target has this value has no loss and no gradient.
  std::int64_t ignore_index = -100;
  /// Whether the losses of the tokens are averaged (Mean), summed (Sum), or not reduced (None).
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  /// The divisor for reduction Mean, a tensor with one element. Default: the number of targets of
  /// this call that are not ignored, at least 1. The default is correct only if every data-parallel
  /// rank has the same number of such targets.
  at::Tensor tokens = {};
  /// Alternative to `tokens`: the data-parallel mesh that was passed to fully_shard. For reduction
  /// Mean, the mean of the losses of these ranks is then the mean over all their targets that are
  /// not ignored. Each call counts the targets by an all-reduce of one number. For micro-batches
  /// use `tokens`, with the targets of all micro-batches.
  DeviceMesh over = {};
  /// Label smoothing as in torch's cross_entropy, a number from 0 to 1.
  double label_smoothing = 0;
  /// The z-loss factor: this factor times log(sum of exp(logits))^2 is added to each token's loss
  /// (PaLM, section 5).
  double z_loss = 0;
};

/// Cross-entropy in fp32 (fp64 for fp64 logits). The full logits are never gathered, as in
/// Megatron-LM's vocab-parallel cross-entropy.
///
/// `logits`: (tokens, vocabulary), plain or distributed on a mesh of any dimensions. The vocabulary
/// may be sharded over some mesh dimensions and the tokens over others, even unevenly. `targets`:
/// (tokens) int64, plain and the same on every rank of the mesh, or distributed on the mesh.
/// Targets with another layout than the rows of the logits are redistributed. Returns the loss over
/// all tokens, a plain scalar that is equal on every rank of the mesh (0 if all targets are
/// ignored). Reduction None returns the loss of each token: a tensor (tokens), distributed if the
/// tokens are sharded, otherwise plain.
///
/// A sharded vocabulary costs two small all-reduces in forward: the maximum of each row; then the
/// sum of exponentials of each row, with the logit of the row's target. Sharded tokens cost an
/// all-reduce of the sum of losses and, if the targets are sharded too, of the number of targets.
/// Backward does not communicate. Collective over the mesh if the logits or the targets are
/// sharded. Differentiable with respect to `logits`; the gradient has the layout and dtype of the
/// logits. The operator tessera::cross_entropy computes the losses of the rows.
///
/// Throws Error for other shapes and dtypes, for logits with a Partial or strided layout, and for a
/// target outside of the vocabulary. After a training forward of a model with fully_shard or
/// replicate on several ranks, a differentiable loss with reduction Mean and ignored targets
/// requires `tokens` or `over`. Backward throws Error under create_graph.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

/// Returns the value for CrossEntropyOptions::tokens: the number of targets that are not ignored,
/// averaged over the ranks of the data-parallel `mesh`. The result is one fp64 number above 0. If
/// each rank divides by this number, averaging by fully_shard gives the gradient of the mean over
/// all tokens of all ranks. For micro-batches, pass the targets of all micro-batches and add the
/// losses. Collective over `mesh`. Not differentiable.
at::Tensor tokens_per_rank(const at::Tensor& targets, const DeviceMesh& mesh,
                           std::int64_t ignore_index = -100);

/// Options of linear_cross_entropy.
struct LinearCrossEntropyOptions {
  CrossEntropyOptions loss{};
  /// The number of chunks into which a rank's tokens are divided. 0: chunk_bytes decides.
  std::int64_t chunks = 0;
  /// The maximum size in bytes of a chunk's logits on one rank, in the dtype of `hidden`. A chunk
  /// has at least one token. A chunk of 1024 or more tokens is rounded down to a multiple of 1024,
  /// a chunk of 128 or more tokens to a multiple of 128. Not used if `chunks` is set.
  std::int64_t chunk_bytes = std::int64_t{256} << 20;
};

/// Computes cross_entropy of the logits hidden * weight^T: the output head and the loss of a
/// language model. One chunk of tokens is computed at a time, so that the full logits never exist.
/// Forward also computes the gradients of a chunk while its logits exist, and backward scales these
/// gradients. Like Liger Kernel's fused linear cross entropy (Hsu et al. 2024).
///
/// `hidden`: (tokens, features). `weight`: (vocabulary, features). `hidden` and `weight` are both
/// plain, or both distributed on one mesh. The weight is replicated, or its vocabulary is sharded
/// over some dimensions. `hidden` is replicated, or its tokens are sharded. Along a mesh dimension
/// that shards the weight, sharded tokens are gathered (sequence parallelism). `targets` and the
/// loss: as for cross_entropy.
///
/// Memory of a rank in addition to the arguments:
/// * the logits of one chunk
/// * with gradients: the gradients of `hidden` and `weight`. For an fp16 or bf16 weight, the sum of
///   the weight's gradient over the chunks is fp32, and is rounded once, in backward.
/// * for such a sum, except on CUDA: a copy of the chunk's rows of `hidden` in fp32, and a copy of
///   the chunk's logits
///
/// Collective like cross_entropy, with two small all-reduces for each chunk. Differentiable with
/// respect to `hidden` and `weight`. The gradient of `hidden` is Partial over a mesh dimension that
/// shards the vocabulary; backward communicates only to reduce this gradient.
///
/// Throws the Errors of cross_entropy. Also throws Error for other shapes, dtypes and layouts, for
/// negative chunks or bytes, and for reduction None with gradients: forward would need the gradient
/// of each loss.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

/// Like linear_cross_entropy() with a weight, for an nn::Linear. The hooks of the module run:
/// tensor parallelism prepares `hidden`, and fully_shard gathers the weight and reduces its
/// gradient. Throws Error for a module with a bias.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, nn::Linear& head,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::tensor_parallel
TESSERA_API_END
