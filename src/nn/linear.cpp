#include "tessera/nn/linear.h"

#include <ATen/ops/linear.h>

#include <cmath>

#include "tessera/nn/initialization.h"

namespace tessera::nn {

Linear::Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options)
    : in_features_(in_features), out_features_(out_features) {
  weight = register_slot("weight", {out_features, in_features});
  if (options.bias) bias = register_slot("bias", {out_features});
}

at::Tensor Linear::forward(const at::Tensor& x) {
  if (bias.defined() && !defer_bias_) return at::linear(x, *weight, *bias);
  return at::linear(x, *weight);
}

void Linear::reset_parameters(const InitContext& init) {
  const double bound = in_features_ > 0 ? 1.0 / std::sqrt(static_cast<double>(in_features_)) : 0.0;
  init.fill(weight, init::uniform(-bound, bound));
  if (bias.defined()) init.fill(bias, init::uniform(-bound, bound));
}

}  // namespace tessera::nn
