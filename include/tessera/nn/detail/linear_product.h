#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// A module with a weight and a bias. forward can leave out the bias, which a hook adds later.
class DeferredBias {
 public:
  /// Sets whether forward leaves out the bias, for row-wise tensor parallelism: the bias must be
  /// added once, after the reduction of the Partial result. Not collective; every rank must pass
  /// the same value.
  void set_defer_bias(bool defer) { defer_bias_ = defer; }

 protected:
  bool leaves_out_bias() const { return defer_bias_; }

 private:
  bool defer_bias_ = false;
};

/// Computes the products of several Linears with one input x. Backward adds the gradients of x in
/// place, unless the addition must communicate, or create_graph is set.
class LinearProducts {
 public:
  virtual ~LinearProducts() = default;
  /// Computes linear_product(x, weight, bias). If x differs from the x of the first call, backward
  /// computes the gradient of x separately.
  virtual at::Tensor add(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) = 0;
};

using MakeLinearProducts = std::unique_ptr<LinearProducts> (*)();
/// Creates a LinearProducts object that computes matrix products with linear_product().
std::unique_ptr<LinearProducts> make_linear_products();

/// A function that replaces aten::linear. x: (..., in); weight: (out, in); bias: (out) or
/// undefined. Distributed arguments must have layouts that aten::linear accepts.
using LinearProduct = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                               const at::Tensor& bias)>;

/// The matrix product of a Linear. Parallel styles and fp8 conversion can replace this product.
class ReplaceableProduct {
 public:
  /// Makes forward(x) compute `product` instead of aten::linear. `together`: makes the
  /// LinearProducts for several modules with the same x; nullptr means separate calls. Not
  /// collective; every rank must set the same function.
  void set_product(LinearProduct product, MakeLinearProducts together = nullptr) {
    product_ = std::move(product);
    together_ = together;
  }

 protected:
  LinearProduct product_;  ///< the function that replaces aten::linear, or empty
  MakeLinearProducts together_ = make_linear_products;
};

/// Computes aten::linear. x: (..., in); weight: (out, in); bias: (out) or undefined. x is saved for
/// the weight's gradient.
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// Computes linear_product() in fp8 (convert_to_fp8), with the gradients of fp8_linear().
at::Tensor fp8_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// Returns `sum` (may be undefined) plus the product of a and b. Writes to the memory of `sum` if
/// nothing is communicated and no backward is recorded.
at::Tensor with_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// Autograd node for the gradient of an input of several matrix products. The node receives the
/// gradients of the results of these matrix products.
class SharedInputNode final : public tessera::detail::Node {
 public:
  /// Computes sum + gradient * weight for matrices. `sum` can be undefined, and can be overwritten.
  using AddTerm = at::Tensor (*)(const at::Tensor& sum, const at::Tensor& gradient,
                                 const at::Tensor& weight);
  SharedInputNode(const at::Tensor& x, AddTerm add_term);

  /// Whether this node computes the gradient of x. False after an in-place write to x, because this
  /// node's gradient then belongs to the earlier value of x.
  bool takes(const at::Tensor& x) const { return next_edge(0) == tessera::detail::edge_to(x); }
  /// Saves the weight of a matrix product. Call keep() for the matrix products in the order in
  /// which edge_of() was called.
  void keep(const at::Tensor& weight) { weights_.emplace_back(weight); }
  /// Returns the graph edge that receives the gradient of a matrix product's result.
  tessera::detail::Edge edge_of(const at::Tensor& result) {
    return {tessera::detail::pointer_to(*this), add_input_metadata(result)};
  }

  tessera::detail::variable_list apply(tessera::detail::variable_list&& gradients) override;
  void release_variables() override;
  std::string name() const override { return "LinearInputBackward"; }

 private:
  struct Weight {
    explicit Weight(const at::Tensor& weight) : saved(weight, /*is_output=*/false) {}
    tessera::detail::SavedVariable saved;
    bool used = false;
  };

  AddTerm add_term_;
  std::vector<Weight> weights_;
};

/// Computes a weight's gradient, the product of rows^T, (out, tokens), and x, (tokens, in).
/// `output`: the index of the gradient among the outputs of `node`. If possible, adds to the
/// weight's `.grad` in place and returns an undefined tensor. Communicates only as aten::mm does.
at::Tensor gradient_of_weight(tessera::detail::Node& node, std::size_t output,
                              const at::Tensor& rows, const at::Tensor& x);

}  // namespace tessera::nn::detail
TESSERA_API_END
