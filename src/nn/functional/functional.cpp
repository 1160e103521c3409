// The functions that are operators of the library: what they do is in src/dtensor/fused/.

#include "tessera/nn/functional.h"

#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::nn {

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
  return tessera::detail::embedding(weight, indices);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return tessera::detail::rms_norm(x, weight, eps);
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  return tessera::detail::silu_mul(gate, up);
}

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return tessera::detail::rotary_embedding(x, cos, sin);
}

}  // namespace tessera::nn
