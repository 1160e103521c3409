// The call of tessera::attention (src/dtensor/fused/attention.cpp), and the kernel that it chooses.

#include "tessera/nn/attention_kernel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

namespace tessera::nn {
namespace {

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
  return tessera::detail::attention(q, k, v, causal, mask, dropout);
}

at::Tensor causal_mask(std::int64_t tokens, std::int64_t window, c10::Device device) {
  const at::Tensor causal = at::ones({tokens, tokens}, at::dtype(c10::kBool).device(device)).tril();
  return window > 0 ? causal.triu(1 - window) : causal;
}

}  // namespace tessera::nn
