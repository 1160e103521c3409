#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/loss_parallel.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Options of linear_cross_entropy.
struct LinearCrossEntropyOptions {
  CrossEntropyOptions loss{};
  /// The number of chunks into which a rank's tokens are divided. 0: chunk_bytes determines the
  /// number.
  std::int64_t chunks = 0;
  /// The maximum size in bytes of a rank's logits for one chunk, in the type of `hidden`. A chunk
  /// has at least one token. The number of tokens of a chunk is rounded down to a multiple of 1024
  /// if it is at least 1024, and to a multiple of 128 if it is at least 128. Not used if `chunks`
  /// is set.
  std::int64_t chunk_bytes = std::int64_t{256} << 20;
};

/// Computes cross_entropy of the logits hidden weight^T: the head of a language model and its loss,
/// computed for one chunk of tokens at a time, so that the full logits never exist. Forward also
/// computes the gradients of a chunk while its logits exist, and backward scales them. Liger
/// Kernel's fused linear cross entropy (Hsu et al. 2024), torchtitan's chunked loss.
///
/// `hidden`: (tokens, features). `weight`: (vocabulary, features). `hidden` and `weight` are both
/// plain, or both distributed on one mesh. The weight is replicated, or its vocabulary is sharded
/// over some dimensions. `hidden` is replicated, or its tokens are sharded. Along a mesh dimension
/// that shards the weight, sharded tokens are gathered (sequence parallelism). `targets` and the
/// loss: as for cross_entropy.
///
/// Memory of a rank in addition to the arguments: the logits of one chunk; with gradients also the
/// gradients of `hidden` and of `weight`. The weight's gradient is summed over the chunks in fp32
/// if the weight has a half type, and rounded to this type once, in backward. Except on CUDA, such
/// a sum needs memory for an fp32 copy of a chunk's rows of `hidden` and for a copy of its logits.
/// Collective like cross_entropy, with two small all-reduces for each chunk. Differentiable by
/// `hidden` and `weight`. The gradient of `hidden` is Partial over a dimension that shards the
/// vocabulary; its reduction is the only communication in backward.
///
/// Throws the Errors of cross_entropy. Also throws Error for other shapes, types and layouts, for
/// negative chunks or bytes, and for kNone with gradients, because forward does not know the factor
/// of each row.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

/// Like the other linear_cross_entropy(), with a module instead of its weight. The hooks of the
/// module run: tensor parallelism prepares `hidden`, and fully_shard gathers the weight and reduces
/// its gradient. Throws Error for a module with a bias.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, nn::Linear& head,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::tensor_parallel
TESSERA_API_END
