#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

// Which of libtorch's kernels computes attention. They take plain tensors and distributed ones that
// are split by batch or heads, and communicate nothing for these.

/// softmax(q k^T / sqrt(width)) v by libtorch's kernels, causal or not. q: (batch, heads, tokens,
/// width); k, v: the same with as many heads, or with fewer, each for several heads of q. `mask`:
/// (tokens of q, of k), or with a batch and heads (or 1) before these, true where a query sees a
/// key, or, in q's type, a term that is added to the scores; undefined, or not causal.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask = {}, double dropout = 0);

/// (tokens, tokens), true where a query sees a key: at most `window` positions back, its own
/// included; 0: all positions before.
at::Tensor causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device);

/// How attention() runs a call: `backend`, and whether it repeats key-value heads
/// (`repeats_heads`).
using AttentionKernel = tessera::detail::AttentionKernel;
/// "flash", "efficient, key-value heads repeated": for logs.
std::string to_string(const AttentionKernel& kernel);

/// Training on a GPU throws Error if libtorch would compute attention by formula ("math"), which is
/// slow and saves all scores. This call allows it, for all threads. Attention with dropout always
/// uses the formula on a GPU. On a CPU nothing is refused.
using tessera::detail::allow_math_attention;

using tessera::detail::AskBackend;
using tessera::detail::backend_of_libtorch;
using tessera::detail::choose_attention;
/// The kernel of training on a device, with this many heads on a rank. `masked`: with a mask
/// tensor, not as causal. Allocates nothing.
AttentionKernel attention_kernel(const at::TensorOptions& options, std::int64_t heads,
                                 std::int64_t kv_heads, std::int64_t tokens, std::int64_t width,
                                 bool masked = false);

}  // namespace tessera::nn
TESSERA_API_END
