#include "tessera/nn/norm.h"

#include <ATen/ops/layer_norm.h>

#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {

RMSNorm::RMSNorm(std::int64_t size, double eps) : eps_(eps) {
  weight = register_slot("weight", {size});
}

at::Tensor RMSNorm::forward(const at::Tensor& x) {
  return nn::rms_norm(x, weight, eps_);
}

void RMSNorm::reset_parameters(const InitContext& init) {
  init.fill(weight, init::ones());
}

LayerNorm::LayerNorm(std::int64_t size, LayerNormOptions options) : size_(size), eps_(options.eps) {
  weight = register_slot("weight", {size});
  if (options.bias) bias = register_slot("bias", {size});
}

at::Tensor LayerNorm::forward(const at::Tensor& x) {
  return at::layer_norm(x, {size_}, *weight, *bias, eps_);
}

void LayerNorm::reset_parameters(const InitContext& init) {
  init.fill(weight, init::ones());
  if (bias.defined()) init.fill(bias, init::zeros());
}

}  // namespace tessera::nn
