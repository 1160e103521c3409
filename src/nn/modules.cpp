// The modules with parameters or other state.
#include <ATen/ops/layer_norm.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/norm.h"

namespace tessera::nn {

Linear::Linear(std::int64_t in_features, std::int64_t out_features, LinearOptions options)
    : in_features_(in_features), out_features_(out_features) {
  weight = register_slot("weight", {out_features, in_features});
  if (options.bias) {
    bias = register_slot("bias", {out_features});
  }
}

at::Tensor Linear::forward(const at::Tensor& x) {
  check_called();
  const at::Tensor y =
      product_ ? product_(x, *weight, own_bias()) : detail::linear_product(x, *weight, own_bias());
  const auto lora = attached<LoraBranch>();
  return lora == nullptr ? y : y.add(lora->term(x, is_training()), lora->scale);
}

at::Tensor Linear::forward(const at::Tensor& x, const LinearProduct& product) {
  check_called();
  TESSERA_CHECK(attached<LoraBranch>() == nullptr,
                "Linear: a function in place of the product was given to a module with an adapter, "
                "whose term nothing would add; merge the adapter first (merge_lora)");
  return product(x, *weight, own_bias());
}

detail::MakeLinearProducts Linear::products_together() const {
  return attached<LoraBranch>() == nullptr && !checkpoints_calls() ? together_ : nullptr;
}

/// rowwise_parallel defers the bias: it adds it after the sum over ranks.
at::Tensor Linear::own_bias() const {
  return bias.defined() && !leaves_out_bias() ? *bias : at::Tensor();
}

void Linear::reset_parameters(const InitContext& init) {
  // PyTorch's default, kaiming_uniform with a = sqrt(5), comes to this bound.
  const double bound = in_features_ > 0 ? 1.0 / std::sqrt(static_cast<double>(in_features_)) : 0.0;
  init.fill(weight, init::uniform(-bound, bound));
  if (bias.defined()) {
    init.fill(bias, init::uniform(-bound, bound));
  }
  // Before B itself is asked: the adapter begins as nothing. A has the rule of every Linear.
  if (const auto lora = attached<LoraBranch>()) {
    init.fill(lora->b->weight, init::zeros());
  }
}

Embedding::Embedding(std::int64_t num_embeddings, std::int64_t embedding_dim)
    : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {
  weight = register_slot("weight", {num_embeddings, embedding_dim});
}

at::Tensor Embedding::forward(const at::Tensor& indices) {
  check_called();
  return nn::embedding(weight, indices);
}

void Embedding::reset_parameters(const InitContext& init) {
  // PyTorch's default. Language models choose a smaller one in their own reset_parameters.
  init.fill(weight, init::normal(0.0, 1.0));
}

RMSNorm::RMSNorm(std::int64_t size, double eps) : eps_(eps) {
  weight = register_slot("weight", {size});
}

at::Tensor RMSNorm::forward(const at::Tensor& x) {
  check_called();
  return nn::rms_norm(x, weight, eps_);
}

std::pair<at::Tensor, at::Tensor> RMSNorm::forward(const at::Tensor& x,
                                                   const at::Tensor& residual) {
  check_called();
  return nn::add_rms_norm(x, residual, weight, eps_);
}

void RMSNorm::reset_parameters(const InitContext& init) {
  init.fill(weight, init::ones());
}

LayerNorm::LayerNorm(std::int64_t size, LayerNormOptions options) : size_(size), eps_(options.eps) {
  weight = register_slot("weight", {size});
  if (options.bias) {
    bias = register_slot("bias", {size});
  }
}

at::Tensor LayerNorm::forward(const at::Tensor& x) {
  check_called();
  // An undefined bias is at::layer_norm's own way to have none.
  return at::layer_norm(x, {size_}, *weight, *bias, eps_);
}

void LayerNorm::reset_parameters(const InitContext& init) {
  init.fill(weight, init::ones());
  if (bias.defined()) {
    init.fill(bias, init::zeros());
  }
}

Dropout::Dropout(double p) : p_(p) {
  // 1 is refused: the scale 1 / (1 - p) would be infinite.
  TESSERA_CHECK(p >= 0.0 && p < 1.0, "dropout with probability ", p,
                " was asked for; it must be in [0, 1)");
}

at::Tensor Dropout::forward(const at::Tensor& x) {
  check_called();
  if (!is_training() || p_ == 0.0) {
    return x;
  }
  if (!key_) {
    TESSERA_CHECK(
        is_in_a_tree(),
        "a Dropout was called in the forward of another module, but no module has it "
        "registered: every such one would drop the same elements, in evaluation too; give "
        "it to register_module");
    key_ = RandomKey{0, stream_of(fqn()->c_str())};
  }
  // A new stream for each call. In a recomputation the count is the forward's, and so the mask.
  return nn::dropout(x, p_, {key_->seed, substream(key_->stream, replayed_count(calls_))});
}

void Dropout::reset_parameters(const InitContext& init) {
  key_ = init.key();
  // With the key, so that a model that is initialised again draws the same masks again.
  calls_ = 0;
}

}  // namespace tessera::nn
