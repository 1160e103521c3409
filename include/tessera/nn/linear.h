#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of a Linear.
struct LinearOptions {
  bool bias = true;
};

/// A function that replaces aten::linear. x: (..., in); weight: (out, in); bias: (out) or
/// undefined. Distributed arguments must have layouts that aten::linear accepts.
using LinearProduct = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                               const at::Tensor& bias)>;

/// Computes y = x weight^T + bias: (..., in) -> (..., out). weight: (out, in), bias: (out). Initial
/// values like torch.nn.Linear: uniform in ±1/sqrt(in).
///
/// forward is aten::linear. With distributed tensors, forward and backward communicate as the
/// operator's table in docs/sharding_rules.md says, and are then collective. Throws the operator's
/// exceptions for sizes and meshes that do not match.
class Linear : public Module<Linear>, public detail::DeferredBias {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options = {});
  at::Tensor forward(const at::Tensor& x);
  /// Computes `product` of x, the weight and the bias instead of aten::linear, as fused operations
  /// need. Throws Error for a module with an adapter (apply_lora), and the exceptions of `product`.
  at::Tensor forward(const at::Tensor& x, const LinearProduct& product);
  /// Makes later calls of forward(x) compute `product` instead of aten::linear, as some parallel
  /// styles need. Not collective; every rank must set the same function. `together` creates the
  /// object that computes several such matrix products of one x. If `together` is nullptr,
  /// linear_products() calls each module separately.
  void set_product(LinearProduct product, detail::MakeLinearProducts together = nullptr) {
    product_ = std::move(product);
    together_ = together;
  }
  void reset_parameters(const InitContext& init) override;

  /// The function that makes an object to compute the matrix products of this and other Linears
  /// together; nullptr if this is not possible.
  detail::MakeLinearProducts products_together() const;
  /// Whether this Linear has a bias that forward leaves out (set_defer_bias).
  bool defers_bias() const { return leaves_out_bias() && bias.defined(); }

  std::int64_t in_features() const { return in_features_; }
  std::int64_t out_features() const { return out_features_; }

  Parameter weight;
  Parameter bias;  ///< the bias; undefined for a Linear without bias

 private:
  at::Tensor own_bias() const;

  std::int64_t in_features_;
  std::int64_t out_features_;
  LinearProduct product_;  ///< the product that replaces aten::linear; empty for aten::linear
  detail::MakeLinearProducts together_ = detail::make_linear_products;
};

/// Calls each of `linears` with x, in order. Backward adds their gradients of x in place, unless a
/// module has an adapter, is checkpointed, computes in fp8 or has a set_product() without
/// `together`. Throws the same exceptions as single calls, and makes the same collectives. The
/// gradients differ from those of single calls only by the order of additions.
std::vector<at::Tensor> linear_products(const at::Tensor& x,
                                        const std::vector<std::reference_wrapper<Linear>>& linears);

}  // namespace tessera::nn
TESSERA_API_END
