#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/export.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/loss_parallel.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// How much of the logits exists at a time, and what loss is taken of them.
struct LinearCrossEntropyOptions {
  CrossEntropyOptions loss{};
  /// The tokens of a rank are taken in this many parts. 0: as many as chunk_bytes asks for.
  std::int64_t chunks = 0;
  /// The most that a rank's logits of one part may take, in the type of `hidden`; but at least one
  /// token's. From 1024 tokens on a part has a multiple of 1024, and from 128 on one of 128. Read
  /// where `chunks` is 0.
  std::int64_t chunk_bytes = std::int64_t{256} << 20;
};

/// cross_entropy of hidden weight^T, the head of a language model and its loss in one, so that the
/// full logits never exist: a part of the tokens at a time. Where gradients are wanted, they are
/// computed beside the loss, while a part's logits are there; the logits' memory then holds their
/// gradient. Liger Kernel's fused linear cross entropy (Hsu et al. 2024); torchtitan's chunked
/// loss.
///
/// `hidden`: (tokens, features). `weight`: (vocabulary, features). Both plain, or both distributed
/// on one mesh: the weight sharded on the vocabulary over some of its dimensions, or replicated;
/// `hidden` sharded on the tokens over others, or replicated, or sharded where the weight is, which
/// gathers it (sequence parallelism). `targets` and the loss: as of cross_entropy.
///
/// Memory of a rank, beside its arguments: one part's logits; with gradients also that of `hidden`,
/// and the sum of that of `weight` over the parts, until backward has given it out in the type of
/// `weight`: in fp32 if the weight is of a half type, but of bf16 in bf16 for up to 16 parts.
/// Collective where cross_entropy is, with its two small all-reduces for each part. Gradients: to
/// `hidden` and `weight`; backward only scales them, and communicates for `hidden` alone, which is
/// Partial where the vocabulary is sharded. Throws Error for what cross_entropy refuses, for other
/// shapes, types and layouts, for negative chunks or bytes, and for kNone where a gradient is
/// wanted: what each row's loss is multiplied by is not known in forward.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

/// The same with the weight of a module, called with its hooks: tensor parallelism prepares
/// `hidden`, fully_shard gathers the weight and reduces its gradient. Throws Error also for a
/// module with a bias.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, nn::Linear& head,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::tensor_parallel
TESSERA_API_END
