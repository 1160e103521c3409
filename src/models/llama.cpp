// The Llama model. The model's code does not communicate: the same code runs on one rank, under
// tensor parallelism and under FSDP.

#include "tessera/models/llama.h"
#include "tessera/nn/detail/lora.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <string>

#include "tessera/core/error.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::models {
namespace {

/// Rope scaling of Llama 3. Rotary frequencies with fewer than low_freq_factor rotations in the
/// original context are divided by s.factor. Above high_freq_factor, nothing changes. Between the
/// limits, frequencies are interpolated.
at::Tensor llama3_frequencies(const RopeScaling& s, const at::Tensor& plain) {
  const at::Tensor turns =
      plain * (static_cast<double>(s.original_positions) / (2 * std::numbers::pi));
  const at::Tensor kept =
      ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1);
  return plain * kept + plain / s.factor * (1 - kept);
}

/// Returns the index, possibly fractional, of the rotary frequency that makes `turns` rotations
/// within the original context.
double index_of_turns(const Rope& rope, std::int64_t head_dim, double turns) {
  const auto original = static_cast<double>(rope.scaling.original_positions);
  return static_cast<double>(head_dim) * std::log(original / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

at::Tensor yarn_frequencies(const Rope& rope, std::int64_t head_dim, const at::Tensor& plain) {
  const RopeScaling& s = rope.scaling;
  double low = index_of_turns(rope, head_dim, s.beta_fast);
  double high = index_of_turns(rope, head_dim, s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) {
    high += 0.001;  // avoids a division by 0 in the interpolation
  }
  const at::Tensor divided =
      ((at::arange(head_dim / 2, plain.options()) - low) / (high - low)).clamp(0, 1);
  return plain / s.factor * divided + plain * (1 - divided);
}

at::Tensor frequencies(const Rope& rope, std::int64_t head_dim) {
  // The rotary frequencies theta^(-2i / head_dim), of shape (head_dim / 2).
  at::Tensor plain = 1.0 / at::pow(rope.theta, at::arange(0, head_dim, 2, at::kFloat) /
                                                   static_cast<double>(head_dim));
  switch (rope.scaling.kind) {
    case RopeScaling::Kind::kNone:
      return plain;
    case RopeScaling::Kind::kLinear:
      return plain / rope.scaling.factor;
    case RopeScaling::Kind::kLlama3:
      return llama3_frequencies(rope.scaling, plain);
    case RopeScaling::Kind::kYarn:
      return yarn_frequencies(rope, head_dim, plain);
  }
  return plain;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> rope_tables(const Rope& rope, std::int64_t head_dim,
                                              std::int64_t positions) {
  const at::Tensor frequency = frequencies(rope, head_dim);
  const at::Tensor half = at::outer(at::arange(positions, frequency.options()), frequency);
  const at::Tensor angle = at::cat({half, half}, 1);
  const double factor = rope.scaling.attention_factor;
  return {angle.cos() * factor, angle.sin() * factor};
}

// KvCache stores position p at index p mod slots_, a ring buffer if attention has a window.
// Attention ignores the order of keys, because rotary embedding is already applied.

KvCache::KvCache(std::int64_t positions, std::int64_t window, std::vector<std::int64_t> padding)
    : positions_(positions),
      slots_(window > 0 ? std::min(positions, window) : positions),
      padding_(std::move(padding)) {
  TESSERA_CHECK(positions > 0 && !padding_.empty(), "a cache of ", positions, " positions for ",
                padding_.size(), " sequences is invalid; both numbers must be 1 or more");
}

bool KvCache::padded() const {
  return std::ranges::any_of(padding_, [](std::int64_t count) { return count > 0; });
}

KvCache::Layer KvCache::append(std::size_t layer, const at::Tensor& keys,
                               const at::Tensor& values) {
  const Layer& kept = layer_like(layer, keys);
  write(kept.keys, keys);
  write(kept.values, values);
  if (tokens_ == 0) {
    return {keys, values};
  }
  const std::int64_t filled = std::min(tokens_ + 1, slots_);
  return {kept.keys.narrow(2, 0, filled), kept.values.narrow(2, 0, filled)};
}

/// Returns the cached keys and values of a layer. The first call allocates memory for this rank's
/// heads, with the dtype of `keys`.
KvCache::Layer& KvCache::layer_like(std::size_t layer, const at::Tensor& keys) {
  if (layer >= layers_.size()) {
    layers_.resize(layer + 1);
  }
  Layer& kept = layers_[layer];
  if (!kept.keys.defined()) {
    const std::vector<std::int64_t> sizes{keys.size(0), keys.size(1), slots_, keys.size(3)};
    // For distributed `keys`, new_empty() returns a distributed tensor with the same layout.
    kept = {keys.new_empty(sizes), keys.new_empty(sizes)};
  }
  return kept;
}

/// Stores the keys or values of the next positions in the cache `slots`. Of more than slots_
/// positions, only the last slots_ positions are stored.
void KvCache::write(const at::Tensor& slots, const at::Tensor& values) const {
  const std::int64_t count = std::min(values.size(2), slots_);
  const std::int64_t skipped = values.size(2) - count;
  const std::int64_t begin = (tokens_ + skipped) % slots_;
  const std::int64_t before_end = std::min(count, slots_ - begin);
  slots.narrow(2, begin, before_end).copy_(values.narrow(2, skipped, before_end));
  if (before_end < count) {
    slots.narrow(2, 0, count - before_end)
        .copy_(values.narrow(2, skipped + before_end, count - before_end));
  }
}

at::Tensor KvCache::mask(c10::Device device) const {
  const std::int64_t filled = std::min(tokens_ + 1, slots_);
  // After the next token is stored, the cache will contain `filled` positions. The oldest of the
  // positions is tokens_ + 1 - filled.
  if (*std::ranges::max_element(padding_) <= tokens_ + 1 - filled) {
    return {};
  }
  const auto integers = at::dtype(c10::kLong).device(device);
  const at::Tensor slot = at::arange(filled, integers);
  const at::Tensor position = tokens_ - (tokens_ - slot).remainder(slots_);
  const at::Tensor first = at::tensor(padding_, at::dtype(c10::kLong)).to(device);
  return position.ge(first.unsqueeze(1)).unsqueeze(1).unsqueeze(1);
}

/// The inputs that are the same for all blocks in one forward.
struct Context : nn::AttentionInputs {
  KvCache* cache = nullptr;  ///< cache of earlier tokens' keys and values; only for generation
};

struct ContextParts {
  const LlamaConfig& config;
  const at::Tensor& cos;  ///< rotary cos and sin, of shape (positions, head_dim)
  const at::Tensor& sin;
  const nn::ContextParallelPtr& context_parallel;
};

namespace {

using Angles = std::pair<at::Tensor, at::Tensor>;

Angles angles_of(const ContextParts& parts, std::int64_t first, std::int64_t last) {
  return {parts.cos.slice(0, first, last), parts.sin.slice(0, first, last)};
}

/// Returns the rotary cos and sin of left-padded texts: (batch * (last - first), head_dim). Text i
/// begins at position padding[i]. Padding gets the values of the text's first token, because no
/// token attends to padding.
Angles angles_of_texts(const ContextParts& parts, const std::vector<std::int64_t>& padding,
                       std::int64_t first, std::int64_t last) {
  std::vector<at::Tensor> cos, sin;
  for (const std::int64_t count : padding) {
    const Angles angles = angles_of(parts, std::max(first - count, std::int64_t{0}), last - count);
    const std::int64_t missing = last - first - angles.first.size(0);
    for (const auto& [table, all] :
         {std::pair(angles.first, &cos), std::pair(angles.second, &sin)}) {
      all->push_back(table.slice(0, 0, 1).expand({missing, -1}));
      all->push_back(table);
    }
  }
  return {at::cat(cos), at::cat(sin)};
}

/// Returns the attention mask (batch, 1, sequence, sequence) of left-padded prompts. Tokens do not
/// attend to padding. Padding attends to itself, because attention over no keys gives NaN.
at::Tensor prompt_mask(const ContextParts& parts, const std::vector<std::int64_t>& padding,
                       std::int64_t sequence) {
  const c10::Device device = parts.cos.device();
  const at::Tensor causal = nn::detail::causal_mask(sequence, parts.config.sliding_window, device);
  const at::Tensor itself = nn::detail::causal_mask(sequence, 1, device);
  const auto integers = at::dtype(c10::kLong).device(device);
  const at::Tensor first = at::tensor(padding, at::dtype(c10::kLong)).to(device);
  const at::Tensor is_token = at::arange(sequence, integers).ge(first.unsqueeze(1));
  return causal.logical_and(is_token.unsqueeze(1)).logical_or(itself).unsqueeze(1);
}

/// Returns the blocks' inputs for tokens of shape (batch, sequence). If `cache` is not nullptr, the
/// tokens follow the cached tokens. The mask is undefined unless there is padding.
Context context_of(const ContextParts& parts, const at::Tensor& tokens, KvCache* cache) {
  if (const nn::ContextParallelPtr& split = parts.context_parallel) {
    // With context parallelism, a rank has cos and sin for its own part of the sequence.
    const auto [cos, sin] = angles_of(parts, 0, tokens.size(1) * split->mesh().size());
    return {{.batch = tokens.size(0),
             .cos = split->shard(cos, 0),
             .sin = split->shard(sin, 0),
             .context_parallel = split},
            nullptr};
  }
  const std::int64_t past = cache != nullptr ? cache->tokens() : 0;
  const std::int64_t sequence = tokens.size(1);
  const bool padded = cache != nullptr && cache->padded();
  TESSERA_CHECK(cache == nullptr || std::ssize(cache->padding()) == tokens.size(0), "tokens of ",
                tokens.size(0), " sequences were passed with a cache for ", cache->padding().size(),
                " sequences; make a cache for the number of sequences in the tokens");
  const auto [cos, sin] = padded ? angles_of_texts(parts, cache->padding(), past, past + sequence)
                                 : angles_of(parts, past, past + sequence);
  at::Tensor mask;
  if (past > 0) {
    mask = cache->mask(parts.cos.device());
  } else if (padded) {
    mask = prompt_mask(parts, cache->padding(), sequence);
  }
  return {{.batch = tokens.size(0), .cos = cos, .sin = sin, .mask = mask}, cache};
}

/// Like context_of(), for packed documents. `positions`: the position of each token within its
/// document, of shape (batch, sequence). `documents`: computed from `positions` if nullptr.
Context document_context(const ContextParts& parts, const at::Tensor& tokens,
                         const at::Tensor& positions, const nn::DocumentsPtr& documents,
                         const KvCache* cache) {
  const nn::ContextParallelPtr& split = parts.context_parallel;
  const std::int64_t ranks = split ? split->mesh().size() : 1;
  TESSERA_CHECK(cache == nullptr && positions.size(0) == tokens.size(0) &&
                    positions.size(1) == tokens.size(1) * ranks,
                "positions of sizes ", positions.sizes(), " were passed with tokens of sizes ",
                tokens.sizes(), cache != nullptr ? " and a cache" : "",
                "; pass one position for each token of the whole sequences, and no cache");
  const at::Tensor rows = (split ? split->shard(positions, 1) : positions).flatten();
  return {{.batch = positions.size(0),
           .cos = parts.cos.index_select(0, rows),
           .sin = parts.sin.index_select(0, rows),
           .context_parallel = split,
           .documents = documents != nullptr
                            ? documents
                            : std::make_shared<const nn::Documents>(positions, parts.cos.device())},
          nullptr};
}

nn::AttentionOptions attention_options(const LlamaConfig& c) {
  return {.hidden = c.hidden_size,
          .heads = c.num_attention_heads,
          .kv_heads = c.num_key_value_heads,
          .head_dim = c.head_dim,
          .qkv_bias = c.query_key_value_bias,
          .output_bias = c.attention_output_bias,
          .qk_norm = c.query_key_norm,
          .qk_norm_over_heads = c.norm_over_heads,
          .norm_eps = c.rms_norm_eps,
          .window = c.sliding_window};
}

nn::MlpOptions mlp_options(const LlamaConfig& c) {
  return {.hidden = c.hidden_size, .inner = c.intermediate_size, .bias = c.mlp_bias};
}

nn::ExpertsOptions experts_options(const LlamaConfig& c) {
  nn::ExpertsOptions options{.hidden = c.hidden_size,
                             .inner = c.moe_intermediate_size,
                             .experts = c.num_experts,
                             .top_k = c.num_experts_per_tok,
                             .normalize = c.norm_topk_prob};
  if (c.mixtral_names) {
    options.names.mlp = {.gate = "w1", .up = "w3", .down = "w2"};
  }
  return options;
}

/// The name that the mixture of experts has as a submodule of a block.
const char* mixture_name(const LlamaConfig& c) {
  return c.mixtral_names ? "block_sparse_moe" : "mlp";
}

}  // namespace

/// nn::Attention with a cache of keys and values, for generation. Inputs and outputs have the shape
/// (tokens, hidden), where `tokens` are all tokens of the batch, sequence after sequence.
class Llama::Attention : public nn::Attention {
 public:
  Attention(const LlamaConfig& c, std::size_t layer)
      : nn::Attention(attention_options(c)), layer_(layer) {}

 private:
  /// `inputs` is always a Context, because only modules of Llama call this attention.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttentionInputs& inputs) override {
    KvCache* cache = static_cast<const Context&>(inputs).cache;
    if (cache == nullptr) {
      return nn::Attention::attend(q, k, v, inputs);
    }
    const KvCache::Layer seen = cache->append(layer_, k, v);
    // A single new token attends to all cached keys, so attention needs no causal mask.
    if (q.size(2) == 1 || inputs.mask.defined()) {
      return nn::attention(q, seen.keys, seen.values, /*causal=*/false, inputs.mask);
    }
    return nn::detail::causal_attention(q, seen.keys, seen.values, {.window = options().window});
  }

  std::size_t layer_;
};

/// A pre-norm Transformer block: x + attention(norm(x)), then x + mlp(norm(x)). In training,
/// dropout is applied to the outputs of attention and MLP.
class Llama::Block : public nn::Module<Llama::Block> {
 public:
  Block(const LlamaConfig& c, std::size_t layer, double dropout)
      : input_layernorm(*this, "input_layernorm", c.hidden_size, c.rms_norm_eps),
        self_attn(*this, "self_attn", c, layer),
        post_attention_layernorm(*this, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        dropout_(dropout) {
    if (has_experts(c, static_cast<std::int64_t>(layer))) {
      experts_ = register_module(mixture_name(c),
                                 std::make_shared<nn::MixtureOfExperts>(experts_options(c)));
    } else {
      mlp_ = register_module("mlp", std::make_shared<nn::SwiGlu>(mlp_options(c)));
    }
  }

  at::Tensor forward(const at::Tensor& x, const Context& context) {
    const auto [normed, h] =
        post_attention_layernorm(drop(self_attn(input_layernorm(x), context)), x);
    return h + drop(experts_ != nullptr ? (*experts_)(normed) : (*mlp_)(normed));
  }

 private:
  /// Applies dropout in training. The random numbers come from tessera::manual_seed, so that
  /// dropout gives equal results on every mesh.
  at::Tensor drop(const at::Tensor& x) const {
    return dropout_ > 0 && is_training() ? at::dropout(x, dropout_, /*train=*/true) : x;
  }

  nn::Child<nn::RMSNorm> input_layernorm;
  nn::Child<Attention> self_attn;
  nn::Child<nn::RMSNorm> post_attention_layernorm;
  std::shared_ptr<nn::SwiGlu> mlp_;                ///< nullptr in a layer that has experts_
  std::shared_ptr<nn::MixtureOfExperts> experts_;  ///< nullptr in a layer that has mlp_
  double dropout_;
};

/// Embedding, blocks and final norm. Hugging Face calls this module "model".
class Llama::Backbone : public nn::Module<Llama::Backbone> {
 public:
  Backbone(const LlamaConfig& c, double dropout)
      : embed_tokens(*this, "embed_tokens", c.vocab_size, c.hidden_size),
        layers(*this, "layers"),
        norm(*this, "norm", c.hidden_size, c.rms_norm_eps) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(c.num_hidden_layers); ++i) {
      blocks.push_back(layers->push_back(std::make_shared<Block>(c, i, dropout)));
    }
  }

  at::Tensor forward(const at::Tensor& tokens, const Context& context) {
    at::Tensor x = embed_tokens(tokens);
    for (const auto& block : blocks) {
      // operator() runs the hooks of FSDP and activation checkpointing; forward() would not.
      x = (*block)(x, context);
    }
    return norm(x);
  }

  nn::Child<nn::Embedding> embed_tokens;
  nn::Child<nn::ModuleList> layers;
  nn::Child<nn::RMSNorm> norm;
  std::vector<std::shared_ptr<Block>> blocks;
};

Llama::Llama(LlamaConfig config, std::int64_t max_sequence, double dropout)
    : config_(std::move(config)), max_sequence_(max_sequence) {
  model_ = register_module("model", std::make_shared<Backbone>(config_, dropout));
  const nn::LinearOptions no_bias{.bias = false};
  lm_head_ = register_module(
      "lm_head", std::make_shared<nn::Linear>(config_.hidden_size, config_.vocab_size, no_bias));
  // The rotary tables are registered as buffers. So in a model on the meta device, the tables are
  // uninitialized, and are materialized and filled together with the parameters.
  cos_ = register_buffer_slot("rope_cos", {max_sequence, config_.head_dim},
                              /*persistent=*/false);
  sin_ = register_buffer_slot("rope_sin", {max_sequence, config_.head_dim},
                              /*persistent=*/false);
  // Ties head and embedding: one parameter with two names, which FSDP shards once. The gradients of
  // head and embedding are added.
  if (config_.tie_word_embeddings) {
    lm_head_->tie_slot("weight", model_->embed_tokens->weight.slot());
  }
}

at::Tensor Llama::forward(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                          const nn::DocumentsPtr& documents) {
  return (*lm_head_)(features(tokens, cache, positions, documents));
}

at::Tensor Llama::forward(const at::Tensor& tokens, const HeadLoss& loss) {
  const at::Tensor hidden = features(tokens, nullptr, loss.positions, loss.documents);
  // With a LoRA adapter on the head, head and loss are computed separately: linear_cross_entropy
  // takes only the weight and would ignore the adapter.
  if (lm_head_->attached<nn::LoraBranch>()) {
    return tensor_parallel::cross_entropy((*lm_head_)(hidden), loss.targets, loss.options.loss);
  }
  return tensor_parallel::linear_cross_entropy(hidden, *lm_head_, loss.targets, loss.options);
}

/// Runs the model without lm_head for tokens (batch, sequence). Returns features (batch * sequence,
/// hidden); with a cache, features of the last token of each sequence, (batch, hidden).
at::Tensor Llama::features(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                           const nn::DocumentsPtr& documents) {
  const std::int64_t past = cache != nullptr ? cache->tokens() : 0;
  const std::int64_t ranks = context_parallel_ ? context_parallel_->mesh().size() : 1;
  const std::int64_t sequence = tokens.size(1) * ranks;
  TESSERA_CHECK(cache == nullptr || !context_parallel_,
                "a cache was passed to a Llama with context parallelism, which is for training "
                "only; generate with a model without context parallelism");
  TESSERA_CHECK(past == 0 || sequence == 1, sequence,
                " tokens were passed with a filled cache; pass the whole prompt in the first call, "
                "then one token per call");
  const std::int64_t most =
      cache != nullptr ? std::min(max_sequence_, cache->positions()) : max_sequence_;
  const bool by_cache = most < max_sequence_;
  TESSERA_CHECK(past + sequence <= most, "position ", past + sequence, " is out of range: ",
                by_cache ? "the cache was made for " : "this Llama was built for ", most,
                by_cache ? " positions; make a larger cache"
                         : " positions; build the model with a larger max_sequence");
  const ContextParts parts{config_, *cos_, *sin_, context_parallel_};
  at::Tensor hidden =
      (*model_)(tokens.flatten(), positions.defined()
                                      ? document_context(parts, tokens, positions, documents, cache)
                                      : context_of(parts, tokens, cache));
  if (cache == nullptr) {
    return hidden;
  }
  cache->advance(sequence);
  return hidden.view({tokens.size(0), sequence, -1}).select(1, sequence - 1);
}

KvCache Llama::new_cache(std::int64_t positions, std::vector<std::int64_t> padding) const {
  return {positions, config_.sliding_window, std::move(padding)};
}

void Llama::reset_parameters(const nn::InitContext& init) {
  using nn::init::ones;
  using nn::init::zeros;
  // The normal distribution is truncated at three standard deviations, because an outlier in a
  // large matrix can disturb the first training steps.
  const auto normal = [](double std) {
    return nn::init::trunc_normal(0.0, std, -3.0 * std, 3.0 * std);
  };
  const double std = config_.initializer_range;
  // The initial std of the 2 L output projections that add to the residual stream is divided by
  // sqrt(2 L), against variance growth with depth (GPT-2).
  const double output_std = std / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));
  nn::Initializers table{{"model.layers.*.self_attn.o_proj.weight", normal(output_std)},
                         {"model.layers.*.*layernorm.weight", ones()},
                         {"model.norm.weight", ones()},
                         {"model.embed_tokens.weight", normal(std)}};
  // The norms of queries and keys get an initializer only if the model has such norms, because an
  // initializer that matches no parameter throws Error.
  if (config_.query_key_norm) {
    table.emplace_back("model.layers.*.self_attn.*_norm.weight", ones());
  }
  if (config_.num_experts == 0 || !config_.dense_layers.empty()) {
    table.emplace_back("model.layers.*.mlp.down_proj.weight", normal(output_std));
  }
  if (config_.num_experts > 0) {
    const std::string experts =
        std::string("model.layers.*.") + mixture_name(config_) + ".experts.";
    table.emplace_back(experts + experts_options(config_).names.mlp.down + ".weight",
                       normal(output_std));
    table.emplace_back(experts + "*.weight", normal(std));
  }
  table.emplace_back("model.layers.*.*.*.weight", normal(std));
  if (config_.query_key_value_bias || config_.mlp_bias) {
    table.emplace_back("model.layers.*.*.*.bias", zeros());
  }
  if (!config_.tie_word_embeddings) {
    table.emplace_back("lm_head.weight", normal(std));
  }
  init.fill(*this, table);
  const auto [cos, sin] = rope_tables(config_.rope, config_.head_dim, max_sequence_);
  init.set_buffer(cos_, cos);
  init.set_buffer(sin_, sin);
}

namespace {

tensor_parallel::ParallelizePlan mlp_plan(const LlamaConfig& c,
                                          const tensor_parallel::BlockPlanOptions& options) {
  const std::string any = "model.layers.*.";
  const auto experts = [&](const std::string& layer) {
    return tensor_parallel::experts_plan(layer + mixture_name(c), experts_options(c), options);
  };
  if (c.num_experts == 0) {
    return tensor_parallel::swi_glu_plan(any + "mlp", {}, options);
  }
  if (c.dense_layers.empty()) {
    return experts(any);
  }
  tensor_parallel::ParallelizePlan plan;
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    plan = tensor_parallel::joined(
        {plan, has_experts(c, i) ? experts(layer)
                                 : tensor_parallel::swi_glu_plan(layer + "mlp", {}, options)});
  }
  return plan;
}

}  // namespace

/// The tensor-parallel plan of Megatron and torchtitan. Attention and MLP each cost one all-reduce
/// per block or, with sequence parallelism, one all-gather and one reduce-scatter.
tensor_parallel::ParallelizePlan Llama::tensor_parallel_plan(
    const DeviceMesh& mesh, const tensor_parallel::DeclaredPlanOptions& options) const {
  using namespace tensor_parallel;  // NOLINT(google-build-using-namespace): as programs write plans
  check_tensor_parallel(config_, mesh.size());
  // Activations have the shape (tokens, hidden), so tokens are dimension 0. Between attention and
  // MLP, activations are sharded in dimension 0 with sequence parallelism, and replicated without.
  const Placement between = options.sequence_parallel ? Placement(Shard{0}) : Replicate{};
  const StylePtr norm =
      options.sequence_parallel ? sequence_parallel({.sequence_dim = 0}) : replicate_parallel();
  const BlockPlanOptions block{.activations = between,
                               .regather = options.regather,
                               .replicate_kv_heads = key_value_copies(config_, mesh.size()) > 1};
  const Placement logits = options.loss_parallel ? Placement(Shard{-1}) : Replicate{};
  const std::string layer = "model.layers.*.";
  return joined({embedding_plan("model.embed_tokens", {.activations = between}),
                 {{layer + "input_layernorm", norm},
                  {layer + "post_attention_layernorm", norm},
                  {"model.norm", norm},
                  {"lm_head", colwise_parallel({.output_layouts = logits,
                                                .use_local_output = !options.loss_parallel,
                                                .regather = options.regather})}},
                 attention_plan(layer + "self_attn", attention_options(config_), block),
                 mlp_plan(config_, block)});
}

std::vector<nn::ModuleBase*> Llama::blocks() const {
  std::vector<nn::ModuleBase*> blocks;
  std::ranges::transform(model_->blocks, std::back_inserter(blocks), &std::shared_ptr<Block>::get);
  return blocks;
}

/// The FSDP units of torchtitan. The embedding is a separate unit, so that the embedding need not
/// stay all-gathered while the blocks run.
std::vector<std::vector<nn::ModuleBase*>> Llama::fsdp_units() {
  std::vector<std::vector<nn::ModuleBase*>> units;
  const bool tied = config_.tie_word_embeddings;
  if (!tied) {
    units.push_back({&*model_->embed_tokens});
  }
  for (nn::ModuleBase* block : blocks()) {
    units.push_back({block});
  }
  if (!tied) {
    units.push_back({&*model_->norm, lm_head_.get()});
  }
  units.push_back({this});
  return units;
}

void Llama::set_context_parallel(const DeviceMesh& mesh) {
  context_parallel_ = std::make_shared<nn::ContextParallel>(mesh);
}

}  // namespace tessera::models
