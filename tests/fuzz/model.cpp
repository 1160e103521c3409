#include "fuzz/model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/where.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "tessera/nn/checkpoint.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::fuzz {
namespace {

constexpr std::int64_t kRank = 2;
constexpr std::int64_t kLongest = 8;

Layer added(nn::ModuleBase& parent, const char* name, Layer made) {
  if (made.module != nullptr) {
    parent.register_module(name, made.module);
  }
  return made;
}

/// Multiplies each feature by an element of a parameter, as in norms that users write by hand.
class Scale : public nn::Module<Scale> {
 public:
  explicit Scale(std::int64_t size) { weight_ = register_slot("weight", {size}); }
  at::Tensor forward(const at::Tensor& x) { return x * *weight_; }

 private:
  nn::Parameter weight_;
};

class Position : public nn::Module<Position> {
 public:
  explicit Position(std::int64_t dim) { weight_ = register_slot("weight", {kLongest, dim}); }
  at::Tensor forward(const at::Tensor& x) { return x + weight_->narrow(0, 0, x.size(1)); }

 private:
  nn::Parameter weight_;
};

class FunctionDropout : public nn::Module<FunctionDropout> {
 public:
  at::Tensor forward(const at::Tensor& x) { return at::dropout(x, kDropout, is_training()); }
};

Layer norm_layer(NormKind kind, std::int64_t size) {
  switch (kind) {
    case NormKind::kNone:
      return {};
    case NormKind::kRms:
      return layer(std::make_shared<nn::RMSNorm>(size));
    case NormKind::kLayer:
      return layer(std::make_shared<nn::LayerNorm>(size));
    case NormKind::kLayerWithoutBias:
      return layer(std::make_shared<nn::LayerNorm>(size, nn::LayerNormOptions{.bias = false}));
    case NormKind::kScale:
      return layer(std::make_shared<Scale>(size));
    case NormKind::kStockLayer:
      return layer(
          std::make_shared<nn::Hooked<torch::nn::LayerNorm>>(torch::nn::LayerNormOptions({size})));
  }
  return {};
}

Layer linear_layer(LinearKind kind, std::int64_t in, std::int64_t out, bool bias) {
  if (kind == LinearKind::kStock) {
    return layer(std::make_shared<nn::Hooked<torch::nn::Linear>>(
        torch::nn::LinearOptions(in, out).bias(bias)));
  }
  return layer(std::make_shared<nn::Linear>(in, out, nn::LinearOptions{.bias = bias}));
}

Layer dropout_layer(DropoutKind kind) {
  switch (kind) {
    case DropoutKind::kNone:
      return {};
    case DropoutKind::kModule:
      return layer(std::make_shared<nn::Dropout>(kDropout));
    case DropoutKind::kFunction:
      return layer(std::make_shared<FunctionDropout>());
    case DropoutKind::kStock:
      return layer(
          std::make_shared<nn::Hooked<torch::nn::Dropout>>(torch::nn::DropoutOptions(kDropout)));
  }
  return {};
}

class Adapted : public nn::Module<Adapted> {
 public:
  Adapted(LinearKind kind, std::int64_t in, std::int64_t out, bool bias)
      : base_(added(*this, "base", linear_layer(kind, in, out, bias))),
        a_(added(*this, "a", linear_layer(LinearKind::kOwn, in, kRank, false))),
        b_(added(*this, "b", linear_layer(LinearKind::kOwn, kRank, out, false))) {}
  at::Tensor forward(const at::Tensor& x) { return base_(x) + b_(a_(x)) * 0.5; }

 private:
  Layer base_, a_, b_;
};

Layer projection(LinearKind kind, std::int64_t in, std::int64_t out, bool bias, bool adapter) {
  return adapter ? layer(std::make_shared<Adapted>(kind, in, out, bias))
                 : linear_layer(kind, in, out, bias);
}

// This attention is written for one rank: no mesh, and the sizes of the whole model.

at::Tensor distances(std::int64_t positions) {
  const at::Tensor steps = at::arange(positions, c10::kDouble);
  return steps.unsqueeze(1) - steps;
}

at::Tensor rotate(const at::Tensor& x, Rotary rotary) {
  const std::int64_t positions = x.size(1), size = x.size(3);
  const at::Tensor rates = at::pow(10.0, at::arange(size / 2, c10::kDouble) * -0.5);
  const at::Tensor half = at::outer(at::arange(positions, c10::kDouble), rates);
  const at::Tensor angles = at::cat({half, half}, -1);
  if (rotary == Rotary::kFunction) {
    return nn::rotary_embedding(x, angles.cos(), angles.sin());
  }
  const std::vector<at::Tensor> parts = x.chunk(2, -1);
  const at::Tensor turned = at::cat({-parts.at(1), parts.at(0)}, -1);
  return x * angles.cos().unsqueeze(1) + turned * angles.sin().unsqueeze(1);
}

}  // namespace

Attention::Attention(const ModelSpec& spec)
    : spec_(spec.attend), heads_(spec.heads), head_dim_(spec.head_dim), folded_(spec.folded) {
  const std::int64_t dim = spec.dim(), kv = spec_.key_value_heads * head_dim_;
  const auto into = [&](const char* name, std::int64_t out, bool adapter) {
    return added(*this, name, projection(LinearKind::kOwn, dim, out, spec_.bias, adapter));
  };
  if (spec_.fused) {
    qkv_ = into("qkv_proj", dim + 2 * kv, false);
  } else {
    q_ = into("q_proj", dim, spec_.adapter);
    k_ = into("k_proj", kv, false);
    v_ = into("v_proj", kv, false);
  }
  q_norm_ = added(*this, "q_norm", norm_layer(spec_.query_key_norm, head_dim_));
  k_norm_ = added(*this, "k_norm", norm_layer(spec_.query_key_norm, head_dim_));
  if (spec_.gain) {
    gain_ = register_slot("gain", {heads_});
  }
  out_ = into("o_proj", dim, false);
}

std::vector<at::Tensor> Attention::project(const at::Tensor& x) {
  if (!spec_.fused) {
    return {q_(x), k_(x), v_(x)};
  }
  const at::Tensor qkv = qkv_(x);
  if (spec_.key_value_heads == heads_) {
    return qkv.chunk(3, -1);
  }
  const std::int64_t kv = spec_.key_value_heads * head_dim_;
  return qkv.split_with_sizes({heads_ * head_dim_, kv, kv}, -1);
}

at::Tensor Attention::forward(const at::Tensor& x, const TokenSizes& sizes) {
  // A projection can return a local tensor that has only the heads of this rank. The number of
  // heads is therefore computed from the tensor's size.
  const auto heads = [&](const at::Tensor& t) {
    return t.view({sizes.batch, sizes.sequence, t.size(-1) / head_dim_, head_dim_});
  };
  const std::vector<at::Tensor> qkv = project(x);
  at::Tensor q = q_norm_(heads(qkv.at(0)));
  at::Tensor k = k_norm_(heads(qkv.at(1)));
  if (spec_.rotary != Rotary::kNone) {
    q = rotate(q, spec_.rotary);
    k = rotate(k, spec_.rotary);
  }
  at::Tensor out = attend(q.transpose(1, 2), k.transpose(1, 2), heads(qkv.at(2)).transpose(1, 2))
                       .transpose(1, 2);
  if (spec_.gain) {
    out = out * gain_->unsqueeze(1);
  }
  const std::int64_t features = out.size(2) * head_dim_;
  return out_(folded_ ? out.reshape({sizes.batch * sizes.sequence, features})
                      : out.reshape({sizes.batch, sizes.sequence, features}));
}

at::Tensor Attention::mask(std::int64_t positions) const {
  const at::Tensor left = distances(positions);
  if (spec_.mask == Mask::kWindow) {
    const at::Tensor near = left.abs().le(2);
    return spec_.causal ? near.logical_and(left.ge(0)) : near;
  }
  const at::Tensor slopes = at::arange(1, heads_ + 1, c10::kDouble).mul(-0.1).view({heads_, 1, 1});
  const at::Tensor bias = slopes * left.abs();
  return spec_.causal ? bias.masked_fill(left.lt(0), -std::numeric_limits<double>::infinity())
                      : bias;
}

at::Tensor Attention::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (spec_.by_hand) {
    return attend_by_hand(q, k, v);
  }
  const double dropout = spec_.dropout && is_training() ? kDropout : 0.0;
  const bool grouped = q.size(1) != k.size(1);
  if (spec_.mask != Mask::kNone) {
    return at::scaled_dot_product_attention(q, k, v, mask(q.size(2)), dropout, false, std::nullopt,
                                            grouped);
  }
  return at::scaled_dot_product_attention(q, k, v, {}, dropout, spec_.causal, std::nullopt,
                                          grouped);
}

at::Tensor Attention::attend_by_hand(const at::Tensor& q, at::Tensor k, at::Tensor v) {
  if (q.size(1) != k.size(1)) {
    const std::int64_t each = q.size(1) / k.size(1);
    k = k.repeat_interleave(each, 1);
    v = v.repeat_interleave(each, 1);
  }
  at::Tensor scores =
      at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(head_dim_));
  if (spec_.mask == Mask::kSlopes) {
    scores = scores + mask(q.size(2));
  } else if (spec_.mask == Mask::kWindow) {
    scores =
        scores.masked_fill(mask(q.size(2)).logical_not(), -std::numeric_limits<double>::infinity());
  } else if (spec_.causal) {
    const at::Tensor later = at::triu(at::ones({q.size(2), q.size(2)}, c10::kBool), 1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor weights =
      at::dropout(scores.softmax(-1), kDropout, spec_.dropout && is_training());
  return at::matmul(weights, v);
}

// The MLP is written for one rank: the code between the projections mentions no mesh.
namespace {

at::Tensor apply_along(Along along, const at::Tensor& x) {
  switch (along) {
    case Along::kNone:
      return x;
    case Along::kSoftmax:
      return x.softmax(-1);
    case Along::kCumsum:
      return x.cumsum(-1);
    case Along::kExchangedHalves: {
      const std::vector<at::Tensor> halves = x.chunk(2, -1);
      return at::cat({halves.at(1), halves.at(0)}, -1);
    }
  }
  return x;
}

}  // namespace

Mlp::Mlp(const ModelSpec& spec) : spec_(spec.feed) {
  const std::int64_t dim = spec.dim();
  const auto into = [&](const char* name, std::int64_t out) {
    return added(*this, name, linear_layer(spec_.linear, dim, out, spec_.bias));
  };
  if (spec_.inner_bias) {
    inner_bias_ = register_slot("inner_bias", {spec_.inner});
  }
  if (spec_.kind == MlpKind::kExperts) {
    const ExpertsSpec& e = spec_.experts;
    mixture_ = register_module("mixture", std::make_shared<nn::MixtureOfExperts>(nn::ExpertsOptions{
                                              .hidden = dim,
                                              .inner = spec_.inner,
                                              .experts = e.experts,
                                              .top_k = e.top_k,
                                              .scores = e.sigmoid ? nn::RouterScores::kSigmoid
                                                                  : nn::RouterScores::kSoftmax,
                                              .normalize = !e.not_normalized,
                                              .selection_bias = e.selection_bias,
                                              .shared_inner = e.shared ? spec_.inner : 0}));
    return;
  }
  if (spec_.kind == MlpKind::kFusedWeight) {
    fused_ = into("gate_up_proj", 2 * spec_.inner);
  } else {
    up_ = into("up_proj", spec_.inner);
  }
  if (spec_.kind == MlpKind::kGated || spec_.kind == MlpKind::kGatedFusedKernel) {
    gate_ = into("gate_proj", spec_.inner);
  }
  middle_norm_ = added(*this, "middle_norm", norm_layer(spec_.middle_norm, spec_.inner));
  dropout_ = added(*this, "dropout", dropout_layer(spec_.dropout));
  down_ = added(*this, "down_proj",
                projection(spec_.linear, spec_.inner, dim, spec_.bias, spec_.adapter));
}

at::Tensor Mlp::activate(const at::Tensor& x) {
  switch (spec_.activation) {
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kCentred:
      return x - x.mean(-1, /*keepdim=*/true);
    case Activation::kRandomMultiply:
      return is_training() ? x * at::rand_like(x) : x;
  }
  return x;
}

at::Tensor Mlp::inner(const at::Tensor& x) {
  switch (spec_.kind) {
    case MlpKind::kPlain:
      return activate(up_(x));
    case MlpKind::kGated:
      return activate(gate_(x)) * up_(x);
    case MlpKind::kGatedFusedKernel:
      return nn::silu_mul(gate_(x), up_(x));
    case MlpKind::kFusedWeight: {
      const std::vector<at::Tensor> halves = fused_(x).chunk(2, -1);
      return activate(halves.at(0)) * halves.at(1);
    }
    case MlpKind::kExperts:
      break;
  }
  return x;
}

at::Tensor Mlp::between(const at::Tensor& x) const {
  const at::Tensor y = apply_along(spec_.along, x);
  return inner_bias_.defined() ? y + *inner_bias_ : y;
}

std::vector<at::Tensor> Mlp::forward(const at::Tensor& x) {
  if (mixture_ != nullptr) {
    return {(*mixture_)(x)};
  }
  const at::Tensor h = between(inner(x));
  std::vector<at::Tensor> results{down_(dropout_(middle_norm_(h)))};
  if (spec_.auxiliary_loss) {
    results.push_back(h.square().mean(-1).sum());
  }
  return results;
}

Block::Block(const ModelSpec& spec) : spec_(spec.feed) {
  if (spec.attention) {
    norm1_ = added(*this, "norm1", norm_layer(spec.norm, spec.dim()));
    attention_ = register_module("attention", std::make_shared<Attention>(spec));
    dropout1_ = added(*this, "dropout1", dropout_layer(spec.dropout));
  }
  if (spec.mlp) {
    norm2_ = added(*this, "norm2", norm_layer(spec.norm, spec.dim()));
    mlp_ = register_module("mlp", std::make_shared<Mlp>(spec));
    dropout2_ = added(*this, "dropout2", dropout_layer(spec.dropout));
  }
  if (spec.residual_scale == ResidualScale::kVector) {
    scale_ = register_slot("scale", {spec.dim()});
  } else if (spec.residual_scale == ResidualScale::kScalar) {
    scale_ = register_slot("scale", {1});
  }
}

std::vector<nn::ModuleBase*> Block::halves() const {
  std::vector<nn::ModuleBase*> halves;
  if (attention_ != nullptr) {
    halves.push_back(attention_.get());
  }
  if (mlp_ != nullptr) {
    halves.push_back(mlp_.get());
  }
  return halves;
}

at::Tensor Block::scaled(const at::Tensor& x) const {
  return scale_.defined() ? x * *scale_ : x;
}

std::vector<at::Tensor> Block::feed(const at::Tensor& x) {
  const auto call = [mlp = mlp_, directly = spec_.calls_forward](const at::Tensor& input) {
    return directly ? mlp->forward(input) : (*mlp)(input);
  };
  return spec_.checkpoint_call ? nn::checkpoint(call, x) : call(x);
}

std::vector<at::Tensor> Block::forward(const at::Tensor& x, const TokenSizes& sizes) {
  at::Tensor h = x;
  if (attention_ != nullptr) {
    h = h + scaled(dropout1_((*attention_)(norm1_(h), sizes)));
  }
  const bool skipped = spec_.skips_empty && sizes.batch == 0;
  if (mlp_ == nullptr || skipped) {
    return {h};
  }
  std::vector<at::Tensor> results = feed(norm2_(h));
  results[0] = h + scaled(dropout2_(results[0]));
  return results;
}

Net::Net(const ModelSpec& spec, Loss loss) : spec_(spec), loss_(loss) {
  const std::int64_t dim = spec.dim();
  const auto embed =
      register_module("embed", std::make_shared<nn::Embedding>(spec.vocabulary, dim));
  embed_ = layer(embed);
  if (spec.position) {
    position_ = added(*this, "position", layer(std::make_shared<Position>(dim)));
  }
  dropout_ = added(*this, "dropout", dropout_layer(spec.dropout));
  const auto list = register_module("blocks", std::make_shared<nn::ModuleList>());
  for (std::int64_t i = 0; i < spec.depth; ++i) {
    blocks_.push_back(list->push_back(std::make_shared<Block>(spec)));
  }
  norm_ = added(*this, "norm", norm_layer(spec.final_norm, dim));
  head_ = register_module(
      "head", std::make_shared<nn::Linear>(dim, spec.vocabulary, nn::LinearOptions{.bias = false}));
  if (spec.tied) {
    head_->tie_slot("weight", embed->weight.slot());
  }
}

at::Tensor Net::embedded(const at::Tensor& tokens) {
  const at::Tensor ids = spec_.folded ? tokens.flatten() : tokens;
  at::Tensor x = dropout_(position_(embed_(ids)));
  if (spec_.padding_mask) {
    x = at::where(ids.remainder(3).eq(0).unsqueeze(-1), x * 0.5, x);
  }
  return x;
}

std::vector<at::Tensor> Net::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  const TokenSizes sizes{tokens.size(0), tokens.size(1)};
  at::Tensor x = embedded(tokens), auxiliary;
  const auto run = [&](Block& block) {
    const std::vector<at::Tensor> results = block(x, sizes);
    x = results.front();
    if (results.size() > 1) {
      auxiliary = auxiliary.defined() ? auxiliary + results[1] : results[1];
    }
  };
  for (const auto& block : blocks_) {
    run(*block);
  }
  if (spec_.repeated) {
    run(*blocks_.front());
  }
  const at::Tensor logits = (*head_)(norm_(x));
  if (targets.defined()) {
    return {sum_of_losses({logits, auxiliary}, targets, loss_)};
  }
  return {logits, auxiliary};
}

at::Tensor sum_of_losses(const std::vector<at::Tensor>& outputs, const at::Tensor& targets,
                         Loss loss) {
  const std::int64_t tokens = targets.numel();
  const at::Tensor logits = outputs[0].view({tokens, outputs[0].size(-1)});
  at::Tensor sum;
  if (loss == Loss::kSquares || tokens == 0) {
    sum = logits.square().sum();
  } else if (loss == Loss::kLossParallel) {
    sum = tensor_parallel::cross_entropy(logits, targets) * tokens;
  } else {
    sum = at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  }
  return outputs[1].defined() ? sum + outputs[1] * 0.1 : sum;
}

void Net::reset_parameters(const nn::InitContext& init) {
  for (const auto& [name, slot] : named_slots()) {
    // 1-D parameters are mostly scales. With scales near 0, activations would vanish.
    const bool vector = slot->get().dim() == 1;
    init.fill(slot, vector ? nn::init::uniform(0.5, 1.5) : nn::init::uniform(-0.6, 0.6));
  }
}

}  // namespace tessera::fuzz
