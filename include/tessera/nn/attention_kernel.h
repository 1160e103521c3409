#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

// Selects the libtorch kernel that computes attention. Arguments are plain tensors, or distributed
// tensors that are sharded by batch or by heads; neither needs communication.

/// softmax(q k^T / sqrt(width)) v by libtorch's kernels, causal or not. q: (batch, heads, tokens,
/// width). k, v: like q, with as many heads or with fewer heads. If k and v have fewer heads,
/// several heads of q use one head of k and v. `mask`: (tokens of q, tokens of k), optionally with
/// leading dimensions for batch and heads (or 1). A bool mask is true where a query sees a key; a
/// mask of q's type is added to the scores. An undefined mask hides nothing. `mask` and `causal`
/// exclude each other.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask = {}, double dropout = 0);

/// How attention() runs a call: `backend` is the kernel, and `repeats_heads` tells whether key and
/// value heads are repeated.
using AttentionKernel = tessera::detail::AttentionKernel;
/// The kernel of attention() as text for logs: "flash", "efficient, key-value heads repeated".
std::string to_string(const AttentionKernel& kernel);

/// allow_math_attention(true) permits attention by formula ("math") in training on a GPU, for all
/// threads. Without this permission attention throws Error there, because the formula is slow and
/// saves all scores. Attention with dropout always uses the formula on a GPU. A CPU accepts every
/// kernel.
using tessera::detail::allow_math_attention;

/// The kernel that attention() uses in training, for the device and type of `options`, and for the
/// numbers of heads on one rank. `masked`: whether a mask tensor is passed instead of the causal
/// flag. Allocates no memory.
AttentionKernel attention_kernel(const at::TensorOptions& options, std::int64_t heads,
                                 std::int64_t kv_heads, std::int64_t tokens, std::int64_t width,
                                 bool masked = false);

}  // namespace tessera::nn
TESSERA_API_END
