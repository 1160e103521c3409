#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/detail/deferred_bias.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of a Linear.
struct LinearOptions {
  bool bias = true;
};

/// Replaces aten::linear: a function of x, (..., in), weight, (out, in), and bias, (out) or
/// undefined, which are distributed as in a call without it.
using LinearProduct = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                               const at::Tensor& bias)>;

/// y = x weight^T + bias: (..., in) -> (..., out). weight: (out, in), bias: (out).
/// Initial values as torch.nn.Linear: uniform in ±1/sqrt(in).
///
/// forward is aten::linear. On distributed tensors it communicates as in that operator's table in
/// docs/sharding_rules.md, forward and backward, and is collective if it does. Throws what the
/// operator throws for sizes and meshes that do not fit.
class Linear : public Module<Linear>, public detail::DeferredBias {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options = {});
  at::Tensor forward(const at::Tensor& x);
  /// `product` of x and the parameters, between this module's hooks: for fused operations. Throws
  /// Error for a module with an adapter (apply_lora), and what `product` throws.
  at::Tensor forward(const at::Tensor& x, const LinearProduct& product);
  /// From now on forward(x) is `product` of x. For styles of parallelism; not collective, and every
  /// rank must set the same.
  void set_product(LinearProduct product) { set_product(std::move(product), nullptr); }
  /// `together` does the same for several products of one x; nullptr: linear_products() calls the
  /// module as any.
  void set_product(LinearProduct product, detail::MakeLinearProducts together) {
    product_ = std::move(product);
    together_ = together;
  }
  void reset_parameters(const InitContext& init) override;

  /// Computes the product of this Linear together with those of others; nullptr: not possible.
  detail::MakeLinearProducts products_together() const;
  /// Whether there is a bias that forward leaves out (set_defer_bias).
  bool defers_bias() const { return leaves_out_bias() && bias.defined(); }

  std::int64_t in_features() const { return in_features_; }
  std::int64_t out_features() const { return out_features_; }

  Parameter weight;
  Parameter bias;  ///< undefined without bias

 private:
  at::Tensor own_bias() const;

  std::int64_t in_features_;
  std::int64_t out_features_;
  LinearProduct product_;  ///< empty: aten::linear
  detail::MakeLinearProducts together_ = detail::make_linear_products;
};

/// linear(x) of each of `linears`, in order. In backward the products add the terms of x's
/// gradient, unless one of the modules has an adapter, is checkpointed, computes in fp8 or has
/// another product. Throws, and is collective, as the single calls. Gradients are those of single
/// calls, apart from the order of additions.
std::vector<at::Tensor> linear_products(const at::Tensor& x,
                                        const std::vector<std::reference_wrapper<Linear>>& linears);

}  // namespace tessera::nn
TESSERA_API_END
