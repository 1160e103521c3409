#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "examples/llama/config.h"
#include "tessera/tessera.hpp"

namespace llama {

/// Keys and values of the tokens seen so far, one pair a layer: (batch, heads, tokens, head_dim).
struct KvCache {
  struct Layer {
    at::Tensor keys, values;
  };
  std::vector<Layer> layers;
  std::int64_t tokens() const { return layers.empty() ? 0 : layers[0].keys.size(2); }
};

/// What every block of one call shares, and is not a tensor that hooks should touch.
struct Context {
  std::int64_t batch = 0;
  at::Tensor cos, sin;       ///< (sequence, head_dim), of the positions of this call
  KvCache* cache = nullptr;  ///< generation only
};

/// Grouped-query self-attention with rotary embedding; causal. x: (tokens, hidden) folded, all
/// sequences of the batch one after another; so is the result.
class Attention : public tessera::nn::Module<Attention> {
 public:
  Attention(const Config& config, int layer);
  at::Tensor forward(const at::Tensor& x, const Context& context);

 private:
  at::Tensor attend(const at::Tensor& q, at::Tensor k, at::Tensor v, const Context& context) const;

  std::int64_t head_dim_;
  std::size_t layer_;
  std::shared_ptr<tessera::nn::Linear> q_proj_, k_proj_, v_proj_, o_proj_;
};

/// SwiGLU: down(silu(gate(x)) * up(x)).
class Mlp : public tessera::nn::Module<Mlp> {
 public:
  explicit Mlp(const Config& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::shared_ptr<tessera::nn::Linear> gate_proj_, up_proj_, down_proj_;
};

/// Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).
class Block : public tessera::nn::Module<Block> {
 public:
  Block(const Config& config, int layer);
  at::Tensor forward(const at::Tensor& x, const Context& context);

 private:
  std::shared_ptr<tessera::nn::RMSNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<Attention> self_attn_;
  std::shared_ptr<Mlp> mlp_;
};

/// Embedding, blocks and final norm: "model" in Hugging Face's names.
class Backbone : public tessera::nn::Module<Backbone> {
 public:
  explicit Backbone(const Config& config);
  /// tokens: (batch * sequence) -> (batch * sequence, hidden).
  at::Tensor forward(const at::Tensor& tokens, const Context& context);
  const std::vector<std::shared_ptr<Block>>& blocks() const { return blocks_; }

 private:
  friend class Llama;
  std::shared_ptr<tessera::nn::Embedding> embed_tokens_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<tessera::nn::RMSNorm> norm_;
};

/// A Llama with Hugging Face's parameter names.
class Llama : public tessera::nn::Module<Llama> {
 public:
  /// `max_sequence`: positions that the rotary tables cover.
  Llama(Config config, std::int64_t max_sequence);
  /// tokens: (batch, sequence) int64 -> logits (batch * sequence, vocabulary). With a cache, the
  /// tokens follow those in it: first a prompt, then one token a call. Throws Error beyond
  /// max_sequence positions.
  at::Tensor forward(const at::Tensor& tokens, KvCache* cache = nullptr);

  const Config& config() const { return config_; }
  Backbone& backbone() { return *model_; }
  /// Blocks first, the model last: the order for fully_shard.
  std::vector<tessera::nn::ModuleBase*> fsdp_units();

  /// Truncated normal (3 standard deviations), norms ones, output projections scaled by depth;
  /// makes the rotary tables.
  void reset_parameters(const tessera::nn::InitContext& init) override;

 private:
  Config config_;
  std::int64_t max_sequence_;
  std::shared_ptr<Backbone> model_;
  std::shared_ptr<tessera::nn::Linear> lm_head_;
  tessera::nn::Parameter cos_, sin_;  ///< rotary tables (max_sequence, head_dim), buffers
};

}  // namespace llama
