#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "tessera/export.h"

/// How tessera::attention runs a call; nn/attention_kernel.h says what for.
TESSERA_API_BEGIN
namespace tessera::detail {

/// A kernel of libtorch's, and its inputs.
struct AttentionKernel {
  at::SDPBackend backend = at::SDPBackend::math;
  /// Makes as many key-value heads as there are heads. libtorch's fp32 kernels on a GPU take no
  /// fewer: it would compute such a call by formula, with all scores in memory, which are larger
  /// than repeated heads.
  bool repeats_heads = false;
};

/// (batch, kv heads, keys, width) -> (batch, heads, keys, width): head i of the result is head
/// i / group of `kv`.
at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t heads);

/// Which of `keys` keys each of `queries` queries sees: the last `length` of those up to its own,
/// which is key `own` for the first query.
struct KeyWindow {
  std::int64_t queries, keys, own, length;
};
/// What that adds to the scores, (queries, keys), in their type, as `q` is: libtorch would convert
/// flags in each call.
at::Tensor window_term(const KeyWindow& window, const at::Tensor& q);

/// Which back end libtorch takes for (q, k, v).
using AskBackend =
    std::function<at::SDPBackend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
/// libtorch's own choice for such a call.
AskBackend backend_of_libtorch(bool causal, const at::Tensor& mask = {}, double dropout = 0);

/// The kernel for (q, k, v) by the answers of `ask`.
AttentionKernel choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AskBackend& ask);

/// Whether training on a GPU may compute attention by formula, which tessera::attention otherwise
/// refuses.
void allow_math_attention(bool allowed);
/// Throws Error if `kernel` is none, where that is not allowed. `masked`: with a mask tensor.
void check_fused(const AttentionKernel& kernel, const at::Tensor& q, const at::Tensor& k,
                 bool masked);

/// The call of tessera::attention. mask: undefined for none.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask, double dropout);

}  // namespace tessera::detail
TESSERA_API_END
