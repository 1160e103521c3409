#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::tensor_parallel {

/// Mean cross-entropy over rows whose target is not `ignore_index`, in fp32.
/// `logits`: (tokens, vocabulary), plain, or distributed on a 1-D mesh and sharded on the
/// vocabulary (uneven and empty shards too). `targets`: (tokens) int64, the same on every rank of
/// that mesh. Sharded: two small all-reduces forward (row maximum; row sum of exponentials together
/// with the target's logit), none backward; the full logits are never gathered. Megatron-LM's
/// vocab-parallel cross-entropy. Gradient: to `logits`, with their layout and type. Returns a plain
/// scalar, equal on every rank of the mesh.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         std::int64_t ignore_index = -100);

}  // namespace tessera::tensor_parallel
