#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <tuple>

#include "tessera/export.h"

/// Functions that select the kernel of tessera::attention; nn/functional.h documents the operator.
TESSERA_API_BEGIN
namespace tessera::detail {

/// A libtorch attention kernel, and how its inputs are prepared.
struct AttentionKernel {
  at::SDPBackend backend = at::SDPBackend::math;
  /// Whether key and value heads are repeated to the number of query heads. libtorch's fp32 GPU
  /// kernels need equal numbers of heads. With unequal numbers libtorch materialises the score
  /// matrix.
  bool repeats_heads = false;
};

/// Repeats heads: (batch, kv heads, keys, width) -> (batch, heads, keys, width). Head i is a copy
/// of kv head floor(i * kv heads / heads).
at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t heads);

/// A sliding window over `keys` keys for `queries` queries. Query i is at position `own` + i among
/// the keys. A query sees the key at the query's position, and at most `length` - 1 keys before.
struct KeyWindow {
  std::int64_t queries, keys, own, length;
};
/// Returns the mask of a sliding window, (queries, keys), to be added to the scores. The mask has
/// the dtype of `q`: libtorch would convert a bool mask in each call.
at::Tensor window_term(const KeyWindow& window, const at::Tensor& q);

/// A function that returns the attention back end that libtorch selects for (q, k, v).
using AskBackend =
    std::function<at::SDPBackend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
/// Returns an AskBackend that asks libtorch with the given options.
AskBackend backend_of_libtorch(bool causal, const at::Tensor& mask = {}, double dropout = 0);

/// Chooses the kernel for (q, k, v). `ask` returns the attention back end that libtorch selects.
AttentionKernel choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AskBackend& ask);

/// Sets whether training on a GPU may use libtorch's math back end, which materialises the score
/// matrix. Otherwise tessera::attention throws Error where only the math back end is possible.
void allow_math_attention(bool allowed);
/// Throws Error if `kernel` is libtorch's math back end and allow_math_attention() has not
/// permitted the math back end. `masked`: whether a mask tensor is used.
void check_fused(const AttentionKernel& kernel, const at::Tensor& q, const at::Tensor& k,
                 bool masked);

/// Calls the operator tessera::attention. An undefined `mask` means no mask.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask, double dropout);

// Functions for attention to a part of the keys, on local tensors. merge() combines the results
// for two parts of the keys. Autograd does not record the functions.

/// Which keys a query sees.
struct SeenKeys {
  bool causal = false;  ///< causal attention: query i sees the keys up to key i
  at::Tensor mask{};    ///< mask (queries, keys), added to the scores; or undefined
};

/// The result of attention_part(). out: (batch, heads, queries, width); log_sum_exp: (batch, heads,
/// queries), fp32, or fp64 for fp64 inputs.
struct AttentionPart {
  at::Tensor out, log_sum_exp;
};

/// The gradients of q, k and v.
using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Returns the kernel that libtorch chooses. Sets `repeats_heads` if the kernel requires as many
/// key and value heads as query heads.
AttentionKernel kernel_of_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const SeenKeys& seen);
/// Computes attention of q to k and v. Every query must see at least one key.
AttentionPart attention_part(const AttentionKernel& kernel, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const SeenKeys& seen);
/// Returns the gradients of q, k and v for one call of attention_part(); the sum over all calls is
/// exact. `whole`: the merged result of all calls.
AttentionGradients attention_part_backward(const AttentionKernel& kernel, const at::Tensor& grad,
                                           const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const AttentionPart& whole,
                                           const SeenKeys& seen);

/// Merges `part` into `merged`. Both are results for the same queries, for different keys. May
/// convert `merged.out` to a wider dtype.
void merge(AttentionPart& merged, const AttentionPart& part);

}  // namespace tessera::detail
TESSERA_API_END
