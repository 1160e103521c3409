#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/nn/module.h"

namespace tessera::nn {

struct LinearOptions {
  bool bias = true;
};

/// y = x weight^T + bias: (..., in) -> (..., out). weight: (out, in), bias: (out).
/// Initial values as torch.nn.Linear: uniform in ±1/sqrt(in).
class Linear : public Module<Linear> {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options = {});
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

  /// Row-parallel: with a weight that is split over its inputs, forward's result is a pending sum,
  /// to which the bias must be added once, after the reduction. A style that reduces in a forward
  /// hook sets this; forward then leaves the bias out, and the hook adds it.
  void set_defer_bias(bool defer) { defer_bias_ = defer; }
  bool defers_bias() const { return defer_bias_ && bias.defined(); }

  std::int64_t in_features() const { return in_features_; }
  std::int64_t out_features() const { return out_features_; }

  Parameter weight;
  Parameter bias;  ///< undefined without bias

 private:
  std::int64_t in_features_;
  std::int64_t out_features_;
  bool defer_bias_ = false;
};

}  // namespace tessera::nn
