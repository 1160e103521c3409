#include "examples/llama/model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <utility>

namespace llama {

using tessera::nn::Embedding;
using tessera::nn::Linear;
using tessera::nn::RMSNorm;

namespace {

/// cos and sin of position * theta^(-2i / head_dim), twice over for the two halves of a head:
/// (sequence, head_dim) each. In fp32 throughout, as Hugging Face computes them.
std::pair<at::Tensor, at::Tensor> rope_tables(std::int64_t sequence, std::int64_t head_dim,
                                              double theta) {
  const auto fp32 = at::TensorOptions().dtype(c10::kFloat);
  const at::Tensor exponent = at::arange(0, head_dim, 2, fp32) / static_cast<double>(head_dim);
  const at::Tensor frequency = 1.0 / at::pow(theta, exponent);
  const at::Tensor half = at::outer(at::arange(sequence, fp32), frequency);
  const at::Tensor angle = at::cat({half, half}, 1);
  return {angle.cos(), angle.sin()};
}

}  // namespace

Attention::Attention(const Config& c, int layer)
    : head_dim_(c.head_dim), layer_(static_cast<std::size_t>(layer)) {
  const std::int64_t q = c.num_attention_heads * c.head_dim;
  const std::int64_t kv = c.num_key_value_heads * c.head_dim;
  const tessera::nn::LinearOptions no_bias{.bias = false};
  q_proj_ = register_module("q_proj", std::make_shared<Linear>(c.hidden_size, q, no_bias));
  k_proj_ = register_module("k_proj", std::make_shared<Linear>(c.hidden_size, kv, no_bias));
  v_proj_ = register_module("v_proj", std::make_shared<Linear>(c.hidden_size, kv, no_bias));
  o_proj_ = register_module("o_proj", std::make_shared<Linear>(q, c.hidden_size, no_bias));
}

at::Tensor Attention::forward(const at::Tensor& x, const Context& context) {
  // The head count is inferred: under tensor parallelism these are this rank's heads.
  const auto heads = [&](const at::Tensor& t) {
    return t.view({context.batch, -1, t.size(1) / head_dim_, head_dim_});
  };
  const at::Tensor q =
      tessera::nn::rotary_embedding(heads((*q_proj_)(x)), context.cos, context.sin);
  const at::Tensor k =
      tessera::nn::rotary_embedding(heads((*k_proj_)(x)), context.cos, context.sin);
  const at::Tensor v = heads((*v_proj_)(x));
  const at::Tensor out =
      attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context).transpose(1, 2);
  return (*o_proj_)(out.reshape({-1, out.size(2) * head_dim_}));
}

at::Tensor Attention::attend(const at::Tensor& q, at::Tensor k, at::Tensor v,
                             const Context& context) const {
  if (context.cache != nullptr) {
    KvCache::Layer& past = context.cache->layers[layer_];
    if (past.keys.defined()) {
      k = at::cat({past.keys, k}, 2);
      v = at::cat({past.values, v}, 2);
    }
    past = {k, v};
  }
  // A single new token may look at everything before it: no mask.
  const bool causal = q.size(2) > 1;
  const bool grouped = q.size(1) != k.size(1);
  return at::scaled_dot_product_attention(q, k, v, {}, 0.0, causal, std::nullopt, grouped);
}

Mlp::Mlp(const Config& c) {
  const tessera::nn::LinearOptions no_bias{.bias = false};
  const std::int64_t inner = c.intermediate_size;
  gate_proj_ =
      register_module("gate_proj", std::make_shared<Linear>(c.hidden_size, inner, no_bias));
  up_proj_ = register_module("up_proj", std::make_shared<Linear>(c.hidden_size, inner, no_bias));
  down_proj_ =
      register_module("down_proj", std::make_shared<Linear>(inner, c.hidden_size, no_bias));
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  return (*down_proj_)(tessera::nn::silu_mul((*gate_proj_)(x), (*up_proj_)(x)));
}

Block::Block(const Config& c, int layer) {
  const auto norm = [&] { return std::make_shared<RMSNorm>(c.hidden_size, c.rms_norm_eps); };
  input_layernorm_ = register_module("input_layernorm", norm());
  self_attn_ = register_module("self_attn", std::make_shared<Attention>(c, layer));
  post_attention_layernorm_ = register_module("post_attention_layernorm", norm());
  mlp_ = register_module("mlp", std::make_shared<Mlp>(c));
}

at::Tensor Block::forward(const at::Tensor& x, const Context& context) {
  const at::Tensor h = x + (*self_attn_)((*input_layernorm_)(x), context);
  return h + (*mlp_)((*post_attention_layernorm_)(h));
}

Backbone::Backbone(const Config& c) {
  embed_tokens_ =
      register_module("embed_tokens", std::make_shared<Embedding>(c.vocab_size, c.hidden_size));
  auto layers = register_module("layers", std::make_shared<tessera::nn::ModuleList>());
  for (int i = 0; i < c.num_hidden_layers; ++i) {
    blocks_.push_back(std::make_shared<Block>(c, i));
    layers->push_back(blocks_.back());
  }
  norm_ = register_module("norm", std::make_shared<RMSNorm>(c.hidden_size, c.rms_norm_eps));
}

at::Tensor Backbone::forward(const at::Tensor& tokens, const Context& context) {
  at::Tensor x = (*embed_tokens_)(tokens);
  for (const auto& block : blocks_) x = (*block)(x, context);
  return (*norm_)(x);
}

Llama::Llama(Config config, std::int64_t max_sequence)
    : config_(std::move(config)), max_sequence_(max_sequence) {
  model_ = register_module("model", std::make_shared<Backbone>(config_));
  const tessera::nn::LinearOptions no_bias{.bias = false};
  lm_head_ = register_module(
      "lm_head", std::make_shared<Linear>(config_.hidden_size, config_.vocab_size, no_bias));
  cos_ = register_buffer_slot("rope_cos", {max_sequence, config_.head_dim});
  sin_ = register_buffer_slot("rope_sin", {max_sequence, config_.head_dim});
  if (config_.tie_word_embeddings) {
    lm_head_->tie_slot("weight", model_->embed_tokens_->weight.slot());
  }
}

at::Tensor Llama::forward(const at::Tensor& tokens, KvCache* cache) {
  const std::int64_t past = cache != nullptr ? cache->tokens() : 0;
  const std::int64_t sequence = tokens.size(1);
  TESSERA_CHECK(past == 0 || sequence == 1, sequence,
                " tokens were given to a filled cache; after the "
                "prompt, which comes at once, give one token a call");
  TESSERA_CHECK(past + sequence <= max_sequence_, "position ", past + sequence,
                " was asked for, but "
                "this Llama was built for ",
                max_sequence_, "; build it with a longer max_sequence");
  if (cache != nullptr) cache->layers.resize(model_->blocks().size());
  const Context context{.batch = tokens.size(0),
                        .cos = cos_->slice(0, past, past + sequence),
                        .sin = sin_->slice(0, past, past + sequence),
                        .cache = cache};
  return (*lm_head_)((*model_)(tokens.flatten(), context));
}

std::vector<tessera::nn::ModuleBase*> Llama::fsdp_units() {
  std::vector<tessera::nn::ModuleBase*> units;
  for (const auto& block : model_->blocks()) units.push_back(block.get());
  units.push_back(this);
  return units;
}

void Llama::reset_parameters(const tessera::nn::InitContext& init) {
  using tessera::nn::init::ones;
  const auto normal = [](double std) {
    return tessera::nn::init::trunc_normal(0.0, std, -3.0 * std, 3.0 * std);
  };
  const double std = config_.initializer_range;
  // Output projections add to the residual stream 2 L times: scaled so that its variance does not
  // grow with depth (GPT-2).
  const double output_std = std / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));
  tessera::nn::Initializers table{{"model.layers.*.self_attn.o_proj.weight", normal(output_std)},
                                  {"model.layers.*.mlp.down_proj.weight", normal(output_std)},
                                  {"model.layers.*.*layernorm.weight", ones()},
                                  {"model.layers.*.*.*.weight", normal(std)},
                                  {"model.norm.weight", ones()},
                                  {"model.embed_tokens.weight", normal(std)}};
  if (!config_.tie_word_embeddings) table.emplace_back("lm_head.weight", normal(std));
  init.fill(*this, table);
  const auto [cos, sin] = rope_tables(max_sequence_, config_.head_dim, config_.rope_theta);
  init.set_buffer(cos_, cos);
  init.set_buffer(sin_, sin);
}

}  // namespace llama
