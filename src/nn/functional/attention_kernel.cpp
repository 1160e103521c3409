// Which of libtorch's attention kernels runs is libtorch's choice, except where that would be the
// slow one for want of equal head counts.

#include "tessera/nn/attention_kernel.h"

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <optional>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::nn {
namespace {

/// Head i of the result is head i / group of `kv`.
at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t heads) {
  return kv.repeat_interleave(heads / kv.size(1), 1);
}

std::optional<at::Tensor> optional_mask(const at::Tensor& mask) {
  return mask.defined() ? std::optional(mask) : std::nullopt;
}

const char* name_of(at::SDPBackend backend) {
  switch (backend) {
    case at::SDPBackend::flash_attention:
      return "flash";
    case at::SDPBackend::efficient_attention:
      return "efficient";
    case at::SDPBackend::cudnn_attention:
      return "cudnn";
    case at::SDPBackend::overrideable:
      return "of the device's library";
    default:
      return "math";
  }
}

}  // namespace

std::string to_string(const AttentionKernel& kernel) {
  return std::string(name_of(kernel.backend)) +
         (kernel.repeats_heads ? ", key-value heads repeated" : "");
}

AskBackend backend_of_libtorch(bool causal, const at::Tensor& mask, double dropout) {
  // Each rank runs it on its own heads.
  const at::Tensor own_mask = mask.defined() ? local_tensor(mask) : mask;
  return [causal, dropout, mask = optional_mask(own_mask)](const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v) {
    return static_cast<at::SDPBackend>(
        at::_fused_sdp_choice(local_tensor(q), local_tensor(k), local_tensor(v), mask, dropout,
                              causal, std::nullopt, q.size(1) != k.size(1)));
  };
}

AttentionKernel choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AskBackend& ask) {
  const at::SDPBackend as_given = ask(q, k, v);
  if (as_given != at::SDPBackend::math || q.is_cpu() || q.size(1) == k.size(1)) {
    return {as_given, false};
  }
  // The answer depends on sizes alone: of repeated heads a view has them, without the copy.
  const auto of_sizes = [&](const at::Tensor& kv) {
    return kv.slice(1, 0, 1).expand({-1, q.size(1), -1, -1});
  };
  const at::SDPBackend repeated = ask(q, of_sizes(k), of_sizes(v));
  return {repeated, repeated != at::SDPBackend::math};
}

AttentionKernel attention_kernel(const at::TensorOptions& options, std::int64_t heads,
                                 std::int64_t kv_heads, std::int64_t tokens, std::int64_t width,
                                 bool masked) {
  const at::Tensor one = at::empty({1, 1, 1, width}, options).requires_grad_();
  const at::Tensor q = one.expand({1, heads, tokens, width});
  const at::Tensor kv = one.expand({1, kv_heads, tokens, width});
  // Kernels want the elements of a row of the mask one after another.
  const at::Tensor mask =
      masked ? at::empty({tokens}, options.dtype(c10::kBool)).expand({tokens, tokens})
             : at::Tensor();
  return choose_attention(q, kv, kv, backend_of_libtorch(/*causal=*/!masked, mask));
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const at::Tensor& mask, double dropout) {
  const std::optional<at::Tensor> seen = optional_mask(mask);
  const bool grouped = q.size(1) != k.size(1);
  if (q.is_meta()) {
    // Shapes alone; libtorch's C++ has no meta kernel of what masks a score.
    return q.matmul(repeat_heads(k, q.size(1)).transpose(2, 3))
        .softmax(-1)
        .matmul(repeat_heads(v, q.size(1)));
  }
  if (grouped && !q.is_cpu() &&
      choose_attention(q, k, v, backend_of_libtorch(causal, mask, dropout)).repeats_heads) {
    return at::scaled_dot_product_attention(q, repeat_heads(k, q.size(1)),
                                            repeat_heads(v, q.size(1)), seen, dropout, causal);
  }
  return at::scaled_dot_product_attention(q, k, v, seen, dropout, causal, std::nullopt, grouped);
}

at::Tensor causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device) {
  const at::Tensor causal = at::ones({tokens, tokens}, at::dtype(c10::kBool).device(device)).tril();
  return window > 0 ? causal.triu(1 - window) : causal;
}

}  // namespace tessera::nn
