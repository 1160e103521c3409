#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::nn {

// Which of libtorch's kernels computes attention. They take plain tensors and distributed ones that
// are split by batch or heads, and communicate nothing for these.

/// softmax(q k^T / sqrt(width)) v by libtorch's kernels, causal or not. q: (batch, heads, tokens,
/// width); k, v: the same with as many heads, or with fewer, each of which serves several. `mask`:
/// (tokens of q, of k), or with a batch and heads (or 1) before these, true where a query sees a
/// key, or of q's type, what is added to the scores; undefined, or not causal.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask = {}, double dropout = 0);

/// (tokens, tokens), true where a query sees a key: at most `window` positions back, its own
/// included; 0: however far.
at::Tensor causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device);

/// How attention() runs a call.
struct AttentionKernel {
  at::SDPBackend backend = at::SDPBackend::math;
  /// Makes as many key-value heads as there are heads. libtorch's fp32 kernels on a GPU take no
  /// fewer: it would compute such a call by formula, with all scores in memory, which are larger
  /// than repeated heads.
  bool repeats_heads = false;
};
/// "flash", "efficient, key-value heads repeated": for logs.
std::string to_string(const AttentionKernel& kernel);

/// Which back end libtorch takes for (q, k, v).
using AskBackend =
    std::function<at::SDPBackend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
/// libtorch's own answer for such a call.
AskBackend backend_of_libtorch(bool causal, const at::Tensor& mask = {}, double dropout = 0);

/// The kernel for (q, k, v) by the answers of `ask`.
AttentionKernel choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AskBackend& ask);
/// That of training on a device, with this many heads on a rank. `masked`: by a mask of its own,
/// not as causal. Takes no memory.
AttentionKernel attention_kernel(const at::TensorOptions& options, std::int64_t heads,
                                 std::int64_t kv_heads, std::int64_t tokens, std::int64_t width,
                                 bool masked = false);

}  // namespace tessera::nn
