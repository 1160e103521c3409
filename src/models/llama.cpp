// The computation has no communication in it: the same code runs on one rank, under tensor
// parallelism and under FSDP. What the layouts are is decided in parallelize.cpp.

#include "tessera/models/llama.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/models/rope.h"
#include "tessera/nn/attention_kernel.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/lora.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::models {

using nn::Embedding;
using nn::Linear;
using nn::RMSNorm;

nn::AttentionOptions attention_options(const LlamaConfig& c) {
  return {.hidden = c.hidden_size,
          .heads = c.num_attention_heads,
          .kv_heads = c.num_key_value_heads,
          .head_dim = c.head_dim,
          .qkv_bias = c.query_key_value_bias,
          .output_bias = c.attention_output_bias,
          .qk_norm = c.query_key_norm,
          .norm_eps = c.rms_norm_eps,
          .window = c.sliding_window};
}

LlamaAttention::LlamaAttention(const LlamaConfig& c, int layer)
    : nn::Attention(attention_options(c)), layer_(static_cast<std::size_t>(layer)) {}

/// Every call of a Llama hands on a Context.
at::Tensor LlamaAttention::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const nn::AttentionInputs& inputs) {
  KvCache* cache = static_cast<const LlamaContext&>(inputs).cache;
  if (cache == nullptr) {
    return nn::Attention::attend(q, k, v, inputs);
  }
  const KvCache::Layer seen = cache->append(layer_, k, v);
  // A single new token may look at everything that is kept.
  const bool causal = q.size(2) > 1 && !inputs.mask.defined();
  return nn::attention(q, seen.keys, seen.values, causal, inputs.mask);
}

/// The names are Hugging Face's, by which weights are loaded and the parallel plan finds modules.
LlamaBlock::LlamaBlock(const LlamaConfig& c, int layer, double dropout) : dropout_(dropout) {
  const auto norm = [&] { return std::make_shared<RMSNorm>(c.hidden_size, c.rms_norm_eps); };
  input_layernorm_ = register_module("input_layernorm", norm());
  self_attn_ = register_module("self_attn", std::make_shared<LlamaAttention>(c, layer));
  post_attention_layernorm_ = register_module("post_attention_layernorm", norm());
  mlp_ = register_module(
      "mlp", std::make_shared<nn::SwiGlu>(nn::MlpOptions{
                 .hidden = c.hidden_size, .inner = c.intermediate_size, .bias = c.mlp_bias}));
}

at::Tensor LlamaBlock::forward(const at::Tensor& x, const LlamaContext& context) {
  const at::Tensor h = x + drop((*self_attn_)((*input_layernorm_)(x), context));
  return h + drop((*mlp_)((*post_attention_layernorm_)(h)));
}

/// The numbers are those of manual_seed, the same on every mesh.
at::Tensor LlamaBlock::drop(const at::Tensor& x) const {
  return dropout_ > 0 && is_training() ? at::dropout(x, dropout_, /*train=*/true) : x;
}

LlamaBackbone::LlamaBackbone(const LlamaConfig& c, double dropout) {
  embed_tokens_ =
      register_module("embed_tokens", std::make_shared<Embedding>(c.vocab_size, c.hidden_size));
  auto layers = register_module("layers", std::make_shared<nn::ModuleList>());
  for (int i = 0; i < c.num_hidden_layers; ++i) {
    blocks_.push_back(std::make_shared<LlamaBlock>(c, i, dropout));
    layers->push_back(blocks_.back());
  }
  norm_ = register_module("norm", std::make_shared<RMSNorm>(c.hidden_size, c.rms_norm_eps));
}

at::Tensor LlamaBackbone::forward(const at::Tensor& tokens, const LlamaContext& context) {
  // The blocks are called as modules, not by forward(), so that hooks run: FSDP's and
  // checkpointing's.
  at::Tensor x = (*embed_tokens_)(tokens);
  for (const auto& block : blocks_) {
    x = (*block)(x, context);
  }
  return (*norm_)(x);
}

Llama::Llama(LlamaConfig config, std::int64_t max_sequence, double dropout)
    : config_(std::move(config)), max_sequence_(max_sequence) {
  model_ = register_module("model", std::make_shared<LlamaBackbone>(config_, dropout));
  const nn::LinearOptions no_bias{.bias = false};
  lm_head_ = register_module(
      "lm_head", std::make_shared<Linear>(config_.hidden_size, config_.vocab_size, no_bias));
  // Slots, not plain tensors: on the meta device they are made without values, like the parameters.
  cos_ = register_buffer_slot("rope_cos", {max_sequence, config_.head_dim},
                              /*persistent=*/false);
  sin_ = register_buffer_slot("rope_sin", {max_sequence, config_.head_dim},
                              /*persistent=*/false);
  // One parameter with two names; FSDP shards it once, and its gradients from both uses add up.
  if (config_.tie_word_embeddings) {
    lm_head_->tie_slot("weight", model_->embed_tokens_->weight.slot());
  }
}

at::Tensor Llama::forward(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions) {
  return (*lm_head_)(features(tokens, cache, positions));
}

at::Tensor Llama::forward(const at::Tensor& tokens, const HeadLoss& loss) {
  const at::Tensor hidden = features(tokens, nullptr, loss.positions);
  // An adapter's term is not part of the product that is taken by parts.
  if (lm_head_->attached<nn::LoraBranch>()) {
    return tensor_parallel::cross_entropy((*lm_head_)(hidden), loss.targets, loss.options.loss);
  }
  return tensor_parallel::linear_cross_entropy(hidden, *lm_head_, loss.targets, loss.options);
}

at::Tensor Llama::features(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions) {
  const std::int64_t past = cache != nullptr ? cache->tokens() : 0;
  const std::int64_t ranks = context_parallel_ ? context_parallel_->mesh().size() : 1;
  const std::int64_t sequence = tokens.size(1) * ranks;
  TESSERA_CHECK(cache == nullptr || !context_parallel_,
                "a cache was given to a Llama with context parallelism, which splits sequences for "
                "training; generate with a model without it");
  TESSERA_CHECK(past == 0 || sequence == 1, sequence,
                " tokens were given to a filled cache; after the "
                "prompt, which comes at once, give one token a call");
  const std::int64_t most =
      cache != nullptr ? std::min(max_sequence_, cache->positions()) : max_sequence_;
  TESSERA_CHECK(past + sequence <= most, "position ", past + sequence, " was asked for, but ",
                most < max_sequence_ ? "the cache was made for " : "this Llama was built for ",
                most, "; build it with a longer ", most < max_sequence_ ? "one" : "max_sequence");
  const at::Tensor hidden =
      (*model_)(tokens.flatten(), positions.defined() ? document_context(positions, tokens, cache)
                                                      : context_of(tokens, cache));
  if (cache == nullptr) {
    return hidden;
  }
  cache->advance(sequence);
  return hidden.view({tokens.size(0), sequence, -1}).select(1, sequence - 1);
}

KvCache Llama::new_cache(std::int64_t positions, std::vector<std::int64_t> padding) const {
  return {positions, config_.sliding_window, std::move(padding)};
}

void Llama::set_context_parallel(const DeviceMesh& mesh) {
  context_parallel_ = std::make_shared<nn::ContextParallel>(mesh);
}

/// Angles by the length of the whole sequence, of the positions that this rank has.
LlamaContext Llama::split_context(std::int64_t batch, std::int64_t sequence) const {
  const auto [cos, sin] = rope(0, sequence);
  return {{.batch = batch,
           .cos = context_parallel_->shard(cos, 0),
           .sin = context_parallel_->shard(sin, 0),
           .context_parallel = context_parallel_},
          nullptr};
}

/// Positions follow those in the cache; the causal mask covers the tokens of this call.
LlamaContext Llama::context_of(const at::Tensor& tokens, KvCache* cache) {
  if (context_parallel_) {
    return split_context(tokens.size(0), tokens.size(1) * context_parallel_->mesh().size());
  }
  const std::int64_t past = cache != nullptr ? cache->tokens() : 0;
  const std::int64_t sequence = tokens.size(1);
  const bool padded = cache != nullptr && cache->padded();
  TESSERA_CHECK(cache == nullptr || std::ssize(cache->padding()) == tokens.size(0), "tokens of ",
                tokens.size(0), " texts were given to a cache for ", cache->padding().size(),
                "; make the cache for as many");
  const auto [cos, sin] =
      padded ? rope_of_texts(cache->padding(), past, past + sequence) : rope(past, past + sequence);
  at::Tensor mask;
  if (past > 0) {
    mask = cache->mask(cos_->device());
  } else if (padded) {
    mask = prompt_mask(cache->padding(), sequence);
  } else {
    mask = window_mask(sequence);
  }
  return {{.batch = tokens.size(0), .cos = cos, .sin = sin, .mask = mask}, cache};
}

/// The tables are made once and sliced, except for angles that depend on how long the text is.
std::pair<at::Tensor, at::Tensor> Llama::rope(std::int64_t first, std::int64_t last) const {
  if (config_.rope.depends_on_length(last)) {
    return rope_tables(config_.rope, config_.head_dim, first, last, last, cos_->device());
  }
  return {cos_->slice(0, first, last), sin_->slice(0, first, last)};
}

/// (batch * (last - first), head_dim): text i begins at position padding[i]. Padding, which nobody
/// sees, gets the angles of the text's first token.
std::pair<at::Tensor, at::Tensor> Llama::rope_of_texts(const std::vector<std::int64_t>& padding,
                                                       std::int64_t first,
                                                       std::int64_t last) const {
  std::vector<at::Tensor> cos, sin;
  for (const std::int64_t count : padding) {
    const auto tables = rope(std::max(first - count, std::int64_t{0}), last - count);
    const std::int64_t missing = last - first - tables.first.size(0);
    for (const auto& [table, all] :
         {std::pair(tables.first, &cos), std::pair(tables.second, &sin)}) {
      all->push_back(table.slice(0, 0, 1).expand({missing, -1}));
      all->push_back(table);
    }
  }
  return {at::cat(cos), at::cat(sin)};
}

/// Only a prompt or a batch needs it, which begins at position 0. Kept, as all steps of a training
/// have one length; undefined within the window.
at::Tensor Llama::window_mask(std::int64_t sequence) {
  const std::int64_t window = config_.sliding_window;
  const c10::Device device = cos_->device();
  if (window == 0 || sequence <= window) {
    return {};
  }
  if (!window_mask_.defined() || window_mask_.size(0) != sequence ||
      window_mask_.device() != device) {
    // A call in inference mode makes it for training, too.
    const c10::InferenceMode ordinary(false);
    window_mask_ = nn::causal_mask(sequence, window, device);
  }
  return window_mask_;
}

/// (batch, 1, sequence, sequence): tokens don't see padding. Padding sees itself: attention of
/// nothing at all is not a number.
at::Tensor Llama::prompt_mask(const std::vector<std::int64_t>& padding,
                              std::int64_t sequence) const {
  const c10::Device device = cos_->device();
  const at::Tensor causal = nn::causal_mask(sequence, config_.sliding_window, device);
  const at::Tensor itself = nn::causal_mask(sequence, 1, device);
  const auto integers = at::dtype(c10::kLong).device(device);
  const at::Tensor first = at::tensor(padding, at::dtype(c10::kLong)).to(device);
  const at::Tensor is_token = at::arange(sequence, integers).ge(first.unsqueeze(1));
  return causal.logical_and(is_token.unsqueeze(1)).logical_or(itself).unsqueeze(1);
}

/// A query sees the tokens of its own document up to itself, and in its window.
LlamaContext Llama::document_context(const at::Tensor& positions, const at::Tensor& tokens,
                                     const KvCache* cache) const {
  const std::int64_t ranks = context_parallel_ ? context_parallel_->mesh().size() : 1;
  TESSERA_CHECK(cache == nullptr && positions.size(0) == tokens.size(0) &&
                    positions.size(1) == tokens.size(1) * ranks,
                "positions of sizes ", positions.sizes(), " were given with tokens of ",
                tokens.sizes(), cache != nullptr ? " and a cache" : "",
                "; give one for each token of the sequences, and no cache");
  const std::int64_t sequence = positions.size(1);
  TESSERA_CHECK(!config_.rope.depends_on_length(sequence), "documents in sequences of ", sequence,
                " tokens were given, but the model's dynamic rope scaling turns by the length of "
                "each text beyond ",
                config_.rope.scaling.original_positions, " tokens; take shorter sequences");
  const at::Tensor document = positions.eq(0).cumsum(1);
  const at::Tensor keys = at::arange(sequence, at::dtype(c10::kLong).device(positions.device()));
  at::Tensor rows = positions, document_of_rows = document, queries = keys;
  if (context_parallel_) {
    rows = context_parallel_->shard(positions, 1);
    document_of_rows = context_parallel_->shard(document, 1);
    queries = context_parallel_->shard(keys, 0);
  }
  at::Tensor seen = queries.unsqueeze(1).ge(keys);
  if (config_.sliding_window > 0) {
    seen = seen.logical_and_(queries.sub(config_.sliding_window).unsqueeze(1).lt(keys));
  }
  const at::Tensor mask =
      document_of_rows.unsqueeze(2).eq(document.unsqueeze(1)).logical_and_(seen);
  rows = rows.flatten();
  return {{.batch = positions.size(0),
           .cos = cos_->index_select(0, rows),
           .sin = sin_->index_select(0, rows),
           .mask = mask.unsqueeze(1),
           .context_parallel = context_parallel_},
          nullptr};
}

/// As torchtitan: with a unit of its own, the embedding is free between the ends of a step.
std::vector<std::vector<nn::ModuleBase*>> Llama::fsdp_units() {
  std::vector<std::vector<nn::ModuleBase*>> units;
  const bool tied = config_.tie_word_embeddings;
  if (!tied) {
    units.push_back({model_->embed_tokens_.get()});
  }
  for (const auto& block : model_->blocks()) {
    units.push_back({block.get()});
  }
  if (!tied) {
    units.push_back({model_->norm_.get(), lm_head_.get()});
  }
  units.push_back({this});
  return units;
}

/// Each parameter takes the first pattern that fits, hence the special ones first.
void Llama::reset_parameters(const nn::InitContext& init) {
  using nn::init::ones;
  using nn::init::zeros;
  // Cut at three standard deviations: a single outlier in a large matrix can unsettle the first
  // steps.
  const auto normal = [](double std) {
    return nn::init::trunc_normal(0.0, std, -3.0 * std, 3.0 * std);
  };
  const double std = config_.initializer_range;
  // Output projections add to the residual stream 2 L times: scaled so that its variance does not
  // grow with depth (GPT-2).
  const double output_std = std / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));
  nn::Initializers table{{"model.layers.*.self_attn.o_proj.weight", normal(output_std)},
                         {"model.layers.*.mlp.down_proj.weight", normal(output_std)},
                         {"model.layers.*.*layernorm.weight", ones()},
                         {"model.norm.weight", ones()},
                         {"model.embed_tokens.weight", normal(std)}};
  // An initialiser that matches nothing is an error.
  if (config_.query_key_norm) {
    table.emplace_back("model.layers.*.self_attn.*_norm.weight", ones());
  }
  table.emplace_back("model.layers.*.*.*.weight", normal(std));
  if (config_.query_key_value_bias || config_.mlp_bias) {
    table.emplace_back("model.layers.*.*.*.bias", zeros());
  }
  if (!config_.tie_word_embeddings) {
    table.emplace_back("lm_head.weight", normal(std));
  }
  init.fill(*this, table);
  const auto [cos, sin] =
      rope_tables(config_.rope, config_.head_dim, 0, max_sequence_, /*length=*/0, c10::kCPU);
  init.set_buffer(cos_, cos);
  init.set_buffer(sin_, sin);
}

}  // namespace tessera::models
