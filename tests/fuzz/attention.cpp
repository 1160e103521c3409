// Attention as users write it for one rank: the sizes are those of the whole.

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/triu.h>

#include <cmath>
#include <limits>

#include "fuzz/model.h"
#include "tessera/nn/functional.h"

namespace tessera::fuzz {
namespace {

/// (positions, positions): how far to the left the second is.
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
  // As many heads as there are here: a plan may have the projections hand out parts.
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
  if (spec_.temperature) {
    q = q * *temperature_;
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

}  // namespace tessera::fuzz
