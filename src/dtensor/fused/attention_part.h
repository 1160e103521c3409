// Attention to some of the keys, with the log-sum-exp of its scores: by these, parts over other
// keys are merged with it. Below autograd, on local tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// Which of the keys a query sees.
struct SeenKeys {
  bool causal = false;  ///< as many queries as keys, and query i sees keys to i
  at::Tensor mask{};    ///< (queries, keys), a term of the scores, in their type; undefined: none
};

/// In the format of libtorch's operators.
inline std::optional<at::Tensor> optional_mask(const at::Tensor& mask) {
  return mask.defined() ? std::optional(mask) : std::nullopt;
}

/// out: (batch, heads, queries, width); log_sum_exp: (batch, heads, queries), fp32, or fp64 for
/// that.
struct AttentionPart {
  at::Tensor out, log_sum_exp;
};

/// Gradients of q, k and v.
using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// The kernel that libtorch chooses; `repeats_heads` wherever it takes no fewer kv heads.
AttentionKernel kernel_of_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const SeenKeys& seen);
/// Attention of q to k and v. Each query sees a key.
AttentionPart attention_part(const AttentionKernel& kernel, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const SeenKeys& seen);
/// The terms of these k and v in the gradients of `whole`, the merged parts: kernels compute the
/// weights again from the log-sum-exp, so that with that of all keys each part's are exact.
AttentionGradients attention_part_backward(const AttentionKernel& kernel, const at::Tensor& grad,
                                           const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionPart& whole,
                                           const SeenKeys& seen);

/// Takes `part`, over other keys, into `merged`, whose `out` may get a wider type.
void merge(AttentionPart& merged, const AttentionPart& part);

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END
