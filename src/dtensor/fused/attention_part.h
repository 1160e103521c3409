// Attention to a part of the keys, with the log-sum-exp of its scores. With the log-sum-exp, the
// result can be merged with results for other keys. Works on local tensors, without recording in
// autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// Determines which keys a query sees.
struct SeenKeys {
  bool causal = false;  ///< causal: as many queries as keys; query i sees the keys up to i
  at::Tensor mask{};    ///< mask that is added to the scores: (queries, keys), in the scores' type;
                        ///< undefined: no mask
};

/// The result of attention. out: (batch, heads, queries, width); log_sum_exp: (batch, heads,
/// queries), fp32, or fp64 for fp64 inputs.
struct AttentionPart {
  at::Tensor out, log_sum_exp;
};

/// Gradients of q, k and v.
using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// libtorch's choice of a kernel. Sets `repeats_heads` if the kernel does not support fewer kv
/// heads than query heads.
AttentionKernel kernel_of_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const SeenKeys& seen);
/// Attention of q to k and v. Every query must see at least one key.
AttentionPart attention_part(const AttentionKernel& kernel, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const SeenKeys& seen);
/// The gradients of q, k and v, which are terms of the gradients of `whole`, the merged result.
/// Kernels recompute the attention weights from the log-sum-exp, so with the log-sum-exp over all
/// keys each term is exact.
AttentionGradients attention_part_backward(const AttentionKernel& kernel, const at::Tensor& grad,
                                           const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionPart& whole,
                                           const SeenKeys& seen);

/// Merges `part`, the attention of the same queries to other keys, into `merged`. `merged.out` may
/// change to a wider type.
void merge(AttentionPart& merged, const AttentionPart& part);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END
