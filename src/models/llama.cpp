// The model, top to bottom: attention, block, backbone, head, initial values, and what it declares
// for parallelize(). The computation has no communication in it: the same code runs on one rank,
// under tensor parallelism and under FSDP.

#include "tessera/models/llama.h"

#include <ATen/ops/dropout.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "contexts.h"
#include "tessera/core/error.h"
#include "tessera/models/rope.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/attention_kernel.h"
#include "tessera/nn/causal_attention.h"
#include "tessera/nn/child.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/mlp.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/block_plans.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::models {
namespace {

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

nn::MlpOptions mlp_options(const LlamaConfig& c) {
  return {.hidden = c.hidden_size, .inner = c.intermediate_size, .bias = c.mlp_bias};
}

}  // namespace

/// nn::Attention with a cache for generation. x: (tokens, hidden) folded, all sequences of the
/// batch one after another; so is the result.
class Llama::Attention : public nn::Attention {
 public:
  Attention(const LlamaConfig& c, std::size_t layer)
      : nn::Attention(attention_options(c)), layer_(layer) {}

 private:
  /// Each call of a Llama passes a Context, so the cast is safe.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttentionInputs& inputs) override {
    KvCache* cache = static_cast<const Context&>(inputs).cache;
    if (cache == nullptr) {
      return nn::Attention::attend(q, k, v, inputs);
    }
    const KvCache::Layer seen = cache->append(layer_, k, v);
    // A single new token may look at everything that is kept.
    if (q.size(2) == 1 || inputs.mask.defined()) {
      return nn::attention(q, seen.keys, seen.values, /*causal=*/false, inputs.mask);
    }
    return nn::causal_attention(q, seen.keys, seen.values, {.window = options().window});
  }

  std::size_t layer_;
};

/// Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); in training with dropout of both sums.
class Llama::Block : public nn::Module<Llama::Block> {
 public:
  Block(const LlamaConfig& c, std::size_t layer, double dropout)
      : input_layernorm(*this, "input_layernorm", c.hidden_size, c.rms_norm_eps),
        self_attn(*this, "self_attn", c, layer),
        post_attention_layernorm(*this, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        mlp(*this, "mlp", mlp_options(c)),
        dropout_(dropout) {}

  at::Tensor forward(const at::Tensor& x, const Context& context) {
    const auto [normed, h] =
        post_attention_layernorm(drop(self_attn(input_layernorm(x), context)), x);
    return h + drop(mlp(normed));
  }

 private:
  /// The numbers are those of tessera::manual_seed, the same on every mesh.
  at::Tensor drop(const at::Tensor& x) const {
    return dropout_ > 0 && is_training() ? at::dropout(x, dropout_, /*train=*/true) : x;
  }

  nn::Child<nn::RMSNorm> input_layernorm;
  nn::Child<Attention> self_attn;
  nn::Child<nn::RMSNorm> post_attention_layernorm;
  nn::Child<nn::SwiGlu> mlp;
  double dropout_;
};

/// Embedding, blocks and final norm: "model" in Hugging Face's names.
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

  /// tokens: (batch * sequence) -> (batch * sequence, hidden).
  at::Tensor forward(const at::Tensor& tokens, const Context& context) {
    at::Tensor x = embed_tokens(tokens);
    for (const auto& block : blocks) {
      // Called as a module, not by forward(), so that hooks run: FSDP's and checkpointing's.
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
  // Slots, not plain tensors: on the meta device they are made without values, like the parameters.
  cos_ = register_buffer_slot("rope_cos", {max_sequence, config_.head_dim},
                              /*persistent=*/false);
  sin_ = register_buffer_slot("rope_sin", {max_sequence, config_.head_dim},
                              /*persistent=*/false);
  // One parameter with two names; FSDP shards it once, and its gradients from both uses add up.
  if (config_.tie_word_embeddings) {
    lm_head_->tie_slot("weight", model_->embed_tokens->weight.slot());
  }
}

at::Tensor Llama::forward(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions) {
  return forward(tokens, cache, positions, /*documents=*/{});
}

at::Tensor Llama::forward(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                          const nn::DocumentsPtr& documents) {
  return (*lm_head_)(features(tokens, cache, positions, documents));
}

at::Tensor Llama::forward(const at::Tensor& tokens, const HeadLoss& loss) {
  const at::Tensor hidden = features(tokens, nullptr, loss.positions, loss.documents);
  // linear_cross_entropy takes the weight alone, without an adapter's term.
  if (lm_head_->attached<nn::LoraBranch>()) {
    return tensor_parallel::cross_entropy((*lm_head_)(hidden), loss.targets, loss.options.loss);
  }
  return tensor_parallel::linear_cross_entropy(hidden, *lm_head_, loss.targets, loss.options);
}

/// All but the head: (batch, sequence) -> (batch * sequence, hidden), with a cache (batch, hidden).
at::Tensor Llama::features(const at::Tensor& tokens, KvCache* cache, const at::Tensor& positions,
                           const nn::DocumentsPtr& documents) {
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
  const bool by_cache = most < max_sequence_;
  TESSERA_CHECK(
      past + sequence <= most, "position ", past + sequence, " was asked for, but ",
      by_cache ? "the cache was made for " : "this Llama was built for ", most,
      by_cache ? "; make it with more positions" : "; build it with a larger max_sequence");
  const ContextParts parts{config_, *cos_, *sin_, context_parallel_};
  at::Tensor hidden =
      (*model_)(tokens.flatten(),
                positions.defined() ? document_context(parts, tokens, {positions, documents}, cache)
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

/// The usual plan of Megatron and torchtitan: a half of a block costs one gather and one
/// reduce-scatter with sequence parallelism, or one all-reduce without.
tensor_parallel::ParallelizePlan Llama::tensor_parallel_plan(
    const DeviceMesh& mesh, const tensor_parallel::DeclaredPlanOptions& options) const {
  using namespace tensor_parallel;  // NOLINT(google-build-using-namespace): as programs write plans
  check_tensor_parallel(config_, mesh.size());
  // Activations are folded to (tokens, hidden): the sequence dimension is 0. Between the halves of
  // a block they are sharded on it, or replicated without sequence parallelism.
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
                 swi_glu_plan(layer + "mlp", {}, block)});
}

std::vector<nn::ModuleBase*> Llama::blocks() const {
  std::vector<nn::ModuleBase*> blocks;
  std::ranges::transform(model_->blocks, std::back_inserter(blocks), &std::shared_ptr<Block>::get);
  return blocks;
}

/// The units of torchtitan. The embedding is a separate one: it is not gathered while the blocks
/// run.
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
