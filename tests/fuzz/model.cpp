// The models of the cases. They are written for one rank, in the ways that users write them: heads
// are viewed with the sizes at hand, so that the same code runs on local heads and on distributed
// ones.

#include "fuzz/model.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/triu.h>

#include <cmath>
#include <limits>

#include "fuzz/operators.h"
#include "tessera/core/error.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"

namespace tessera::fuzz {
Attention::Attention(const ModelSpec& spec)
    : spec_(spec.attend), heads_(spec.heads), head_dim_(spec.head_dim), folded_(spec.folded) {
  const std::int64_t dim = spec.dim(), kv = spec_.key_value_heads * head_dim_;
  const auto into = [&](const char* name, std::int64_t out, bool adapter) {
    Layer made = projection(LinearKind::kOwn, dim, out, spec_.bias, adapter);
    register_module(name, made.module);
    return made;
  };
  if (spec_.fused) {
    qkv_ = into("qkv_proj", dim + 2 * kv, false);
  } else {
    q_ = into("q_proj", dim, spec_.adapter);
    k_ = into("k_proj", kv, false);
    v_ = into("v_proj", kv, false);
  }
  if (spec_.query_key_norm != NormKind::kNone) {
    q_norm_ = norm_layer(spec_.query_key_norm, head_dim_);
    k_norm_ = norm_layer(spec_.query_key_norm, head_dim_);
    register_module("q_norm", q_norm_.module);
    register_module("k_norm", k_norm_.module);
  }
  if (spec_.temperature) {
    temperature_ = register_slot("temperature", {1});
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
  // A fraction of what is here, so that it runs on a part of the features as well.
  const std::int64_t q = qkv.size(-1) / 2, kv = q / 2;
  return qkv.split_with_sizes({q, kv, kv}, -1);
}

at::Tensor Attention::forward(const at::Tensor& x, const TokenSizes& sizes) {
  const auto heads = [&](const at::Tensor& t) {
    return t.view({sizes.batch, sizes.sequence, t.size(-1) / head_dim_, head_dim_});
  };
  const std::vector<at::Tensor> qkv = project(x);
  at::Tensor q = q_norm_(heads(qkv.at(0)));
  const at::Tensor k = k_norm_(heads(qkv.at(1)));
  // libtorch's attention divides by their number.
  TESSERA_CHECK(k.size(2) > 0, "this rank has no head of keys");
  if (spec_.temperature) {
    q = q * *temperature_;
  }
  const at::Tensor out =
      attend(q.transpose(1, 2), k.transpose(1, 2), heads(qkv.at(2)).transpose(1, 2))
          .transpose(1, 2);
  const std::int64_t features = out.size(2) * head_dim_;
  return out_(folded_ ? out.reshape({sizes.batch * sizes.sequence, features})
                      : out.reshape({sizes.batch, sizes.sequence, features}));
}

at::Tensor Attention::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (spec_.by_hand) {
    return attend_by_hand(q, k, v);
  }
  const double dropout = spec_.dropout && is_training() ? kDropout : 0.0;
  return at::scaled_dot_product_attention(q, k, v, {}, dropout, spec_.causal, std::nullopt,
                                          q.size(1) != k.size(1));
}

at::Tensor Attention::attend_by_hand(const at::Tensor& q, at::Tensor k, at::Tensor v) {
  if (q.size(1) != k.size(1)) {
    const std::int64_t each = q.size(1) / k.size(1);
    k = k.repeat_interleave(each, 1);
    v = v.repeat_interleave(each, 1);
  }
  at::Tensor scores =
      at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(head_dim_));
  if (spec_.causal) {
    const at::Tensor later = at::triu(at::ones({q.size(2), q.size(2)}, c10::kBool), 1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor weights =
      at::dropout(scores.softmax(-1), kDropout, spec_.dropout && is_training());
  return at::matmul(weights, v);
}

Mlp::Mlp(const ModelSpec& spec) : spec_(spec.feed) {
  const std::int64_t dim = spec.dim();
  const auto into = [&](const char* name, std::int64_t out) {
    Layer made = linear_layer(spec_.linear, dim, out, spec_.bias);
    register_module(name, made.module);
    return made;
  };
  if (spec_.kind == MlpKind::kFusedWeight) {
    fused_ = into("gate_up_proj", 2 * spec_.inner);
  } else {
    up_ = into("up_proj", spec_.inner);
  }
  if (spec_.kind == MlpKind::kGated || spec_.kind == MlpKind::kGatedFusedKernel) {
    gate_ = into("gate_proj", spec_.inner);
  }
  if (spec_.middle_norm != NormKind::kNone) {
    middle_norm_ = norm_layer(spec_.middle_norm, spec_.inner);
    register_module("middle_norm", middle_norm_.module);
  }
  if (spec_.dropout != DropoutKind::kNone) {
    dropout_ = dropout_layer(spec_.dropout);
    register_module("dropout", dropout_.module);
  }
  down_ = projection(spec_.linear, spec_.inner, dim, spec_.bias, spec_.adapter);
  register_module("down_proj", down_.module);
}

at::Tensor Mlp::activate(const at::Tensor& x) {
  switch (spec_.activation) {
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kCentred:
      return x - x.mean(-1, /*keepdim=*/true);
    case Activation::kComposite:
      return call_operator("fuzz::composite", x);
    case Activation::kKernelOfAten:
      return call_operator("fuzz::kernel_of_aten", x);
    case Activation::kWithAutograd:
      return call_operator("fuzz::with_autograd", x);
    case Activation::kWithoutRule:
      return call_operator("fuzz::without_rule", x);
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
  }
  return x;
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  return down_(dropout_(middle_norm_(inner(x))));
}

Block::Block(const ModelSpec& spec) : spec_(spec.feed) {
  const auto add = [&](const char* name, Layer made) {
    if (made.module != nullptr) {
      register_module(name, made.module);
    }
    return made;
  };
  if (spec.attention) {
    norm1_ = add("norm1", norm_layer(spec.norm, spec.dim()));
    attention_ = register_module("attention", std::make_shared<Attention>(spec));
    dropout1_ = add("dropout1", dropout_layer(spec.dropout));
  }
  if (spec.mlp) {
    norm2_ = add("norm2", norm_layer(spec.norm, spec.dim()));
    mlp_ = register_module("mlp", std::make_shared<Mlp>(spec));
    dropout2_ = add("dropout2", dropout_layer(spec.dropout));
  }
  if (spec.residual_scale == ResidualScale::kVector) {
    scale_ = register_slot("scale", {spec.dim()});
  } else if (spec.residual_scale == ResidualScale::kScalar) {
    scale_ = register_slot("scale", {1});
  } else if (spec.residual_scale == ResidualScale::kStray) {
    stray_ = register_parameter("stray", at::ones({spec.dim()}, c10::kDouble));
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
  if (stray_.defined()) {
    return x * stray_;
  }
  return scale_.defined() ? x * *scale_ : x;
}

at::Tensor Block::feed(const at::Tensor& x) {
  const auto call = [mlp = mlp_, directly = spec_.calls_forward](const at::Tensor& input) {
    return directly ? mlp->forward(input) : (*mlp)(input);
  };
  return spec_.checkpoint_call ? nn::checkpoint(call, x) : call(x);
}

at::Tensor Block::forward(const at::Tensor& x, const TokenSizes& sizes) {
  at::Tensor h = x;
  if (attention_ != nullptr) {
    h = h + scaled(dropout1_((*attention_)(norm1_(h), sizes)));
  }
  const bool skipped = spec_.skips_empty && sizes.batch == 0;
  if (mlp_ != nullptr && !skipped) {
    h = h + scaled(dropout2_(feed(norm2_(h))));
  }
  return h;
}

Net::Net(const ModelSpec& spec) : spec_(spec) {
  const std::int64_t dim = spec.dim();
  const auto embed =
      register_module("embed", std::make_shared<nn::Embedding>(spec.vocabulary, dim));
  embed_ = layer(embed);
  const auto add = [&](const char* name, Layer made) {
    if (made.module != nullptr) {
      register_module(name, made.module);
    }
    return made;
  };
  if (spec.position) {
    position_ = add("position", position_layer(dim));
  }
  dropout_ = add("dropout", dropout_layer(spec.dropout));
  const auto list = register_module("blocks", std::make_shared<nn::ModuleList>());
  for (std::int64_t i = 0; i < spec.depth; ++i) {
    blocks_.push_back(list->push_back(std::make_shared<Block>(spec)));
  }
  norm_ = add("norm", norm_layer(spec.final_norm, dim));
  if (spec.local_map_scale) {
    scale_ = add("scale", local_map_scale_layer(dim));
  }
  head_ = register_module(
      "head", std::make_shared<nn::Linear>(dim, spec.vocabulary, nn::LinearOptions{.bias = false}));
  if (spec.tied) {
    head_->tie_slot("weight", embed->weight.slot());
  }
}

at::Tensor Net::forward(const at::Tensor& tokens) {
  const TokenSizes sizes{tokens.size(0), tokens.size(1)};
  at::Tensor x = dropout_(position_(embed_(spec_.folded ? tokens.flatten() : tokens)));
  for (const auto& block : blocks_) {
    x = (*block)(x, sizes);
  }
  if (spec_.repeated) {
    x = (*blocks_.front())(x, sizes);
  }
  return (*head_)(scale_(norm_(x)));
}

void Net::reset_parameters(const nn::InitContext& init) {
  for (const auto& [name, slot] : named_slots()) {
    // Vectors are scales for the most part: around one, so that what they scale does not vanish.
    const bool vector = slot->get().dim() == 1;
    init.fill(slot, vector ? nn::init::uniform(0.5, 1.5) : nn::init::uniform(-0.6, 0.6));
  }
}

}  // namespace tessera::fuzz
