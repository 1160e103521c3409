#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension. Statistics are computed in fp32, or
/// in fp64 for fp64 inputs. (..., size) -> (..., size). weight: (size), initially ones. Zhang &
/// Sennrich 2019.
///
/// forward does not communicate. Throws Error for other sizes and for layouts that nn::rms_norm
/// refuses. The comment of nn::rms_norm describes the gradients.
class RMSNorm : public Module<RMSNorm> {
 public:
  explicit RMSNorm(std::int64_t size, double eps = 1e-5);
  at::Tensor forward(const at::Tensor& x);
  /// Returns the norm of x + residual, and the sum x + residual, which is the residual of the
  /// transformer block's next norm (nn::add_rms_norm).
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& residual);
  void reset_parameters(const InitContext& init) override;

  double eps() const { return eps_; }

  Parameter weight;

 private:
  double eps_;
};

/// Options of a LayerNorm.
struct LayerNormOptions {
  double eps = 1e-5;
  bool bias = true;
};

/// (x - mean) / sqrt(var + eps) * weight + bias over the last dimension. (..., size) -> (...,
/// size). weight, bias: (size), initially ones and zeros. Ba et al. 2016.
///
/// forward is aten::layer_norm. With distributed tensors, forward and backward communicate as the
/// operator's table in docs/sharding_rules.md says, and are then collective. Throws the operator's
/// exceptions for other sizes.
class LayerNorm : public Module<LayerNorm> {
 public:
  explicit LayerNorm(std::int64_t size, LayerNormOptions options = {});
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters(const InitContext& init) override;

  Parameter weight;
  Parameter bias;  ///< the bias; undefined for a LayerNorm without bias

 private:
  std::int64_t size_;
  double eps_;
};

}  // namespace tessera::nn
TESSERA_API_END
