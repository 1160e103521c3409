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
  /// The divisor for reduction Mean, a tensor with one element. Default: this call's number of
  /// targets that are not ignored; correct only if this number is equal on all data-parallel ranks.
  at::Tensor tokens = {};
  /// Alternative to `tokens`: the data-parallel mesh of fully_shard. Reduction Mean then averages
  /// over the targets of all ranks of this mesh, by an all-reduce of one number per call. For
  /// micro-batches use `tokens`.
  DeviceMesh over = {};
  /// Label smoothing as in torch's cross_entropy, a number from 0 to 1.
  double label_smoothing = 0;
  /// The z-loss factor: this factor times log(sum of exp(logits))^2 is added to each token's loss
  /// (PaLM, section 5).
  double z_loss = 0;
};

/// Cross-entropy in fp32 (fp64 for fp64 logits). The full logits are never gathered, as in
/// Megatron-LM's vocab-parallel cross-entropy. `logits`: (tokens, vocabulary), plain or
/// distributed; vocabulary and tokens may be sharded, even unevenly. `targets`: (tokens) int64,
/// plain and equal on every rank, or distributed on the same mesh. Targets are redistributed to the
/// layout of the rows.
///
/// Returns the loss over all tokens: a plain scalar, equal on every rank of the mesh, 0 if all
/// targets are ignored. Reduction None returns (tokens) losses, distributed if the tokens are
/// sharded.
///
/// Collective over the mesh if logits or targets are sharded; backward does not communicate. The
/// gradient has the layout and dtype of the logits. Throws Error for other shapes, dtypes and
/// layouts (Partial, strided), and for targets outside of the vocabulary. Backward throws Error
/// under create_graph. In training with fully_shard or replicate on several ranks, a mean with
/// ignored targets throws Error without `tokens` or `over`.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

/// Returns CrossEntropyOptions::tokens: the number of targets that are not ignored, averaged over
/// the data-parallel `mesh`, as one fp64 number above 0. For micro-batches, pass the targets of all
/// micro-batches and add the losses. Collective over `mesh`. Not differentiable.
at::Tensor tokens_per_rank(const at::Tensor& targets, const DeviceMesh& mesh,
                           std::int64_t ignore_index = -100);

/// Options of linear_cross_entropy.
struct LinearCrossEntropyOptions {
  CrossEntropyOptions loss{};
  /// The number of chunks into which a rank's tokens are divided. 0: chunk_bytes decides.
  std::int64_t chunks = 0;
  /// The maximum bytes of a chunk's logits on one rank, in the dtype of `hidden`. Chunks are
  /// rounded down to multiples of 1024 or 128 tokens, if larger, and have at least one token. Not
  /// used with `chunks`.
  std::int64_t chunk_bytes = std::int64_t{256} << 20;
};

/// Computes cross_entropy of the logits hidden * weight^T, one chunk of tokens at a time, so that
/// the full logits never exist. Forward also computes the gradients. Like Liger Kernel's fused
/// linear cross entropy (Hsu et al. 2024).
///
/// `hidden`: (tokens, features), `weight`: (vocabulary, features), both plain or both distributed
/// on one mesh. The weight may be sharded over the vocabulary, `hidden` over the tokens. If a mesh
/// dimension shards both, tokens are gathered (sequence parallelism). `targets` and result: see
/// cross_entropy.
///
/// Memory of a rank in addition to the arguments:
/// * the logits of one chunk
/// * with gradients: the gradients of `hidden` and `weight`; for a 16-bit weight, the weight's
///   gradient is summed in fp32
/// * for such a sum, except on CUDA: copies of the chunk's rows of `hidden` and of the chunk's
///   logits
///
/// Collective like cross_entropy, with two small all-reduces for each chunk. Differentiable;
/// backward only reduces the gradient of `hidden`, which is Partial over dimensions that shard the
/// vocabulary. Throws the Errors of cross_entropy. Throws Error for negative chunks or bytes, and
/// for reduction None with gradients.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

/// Like linear_cross_entropy() with a weight, but runs the hooks of `module`: tensor parallelism
/// prepares `hidden`, and FSDP gathers the weight. Throws Error for a module with a bias.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, nn::Linear& head,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::tensor_parallel
TESSERA_API_END
