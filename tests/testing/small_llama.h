#pragma once

#include <ATen/ops/silu.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::testing {

struct SmallLlamaConfig {
  std::int64_t vocabulary = 13, dim = 8, inner = 30, hidden = 10;
  int depth = 2;
  bool bias = false;
  bool together = true;  ///< `together`: computes projections by linear_products()
};

inline std::vector<at::Tensor> products_of(
    const SmallLlamaConfig& c, const at::Tensor& x,
    const std::vector<std::reference_wrapper<nn::Linear>>& linears) {
  if (c.together) {
    return nn::linear_products(x, linears);
  }
  std::vector<at::Tensor> results;
  for (nn::Linear& linear : linears) {
    results.push_back(linear(x));
  }
  return results;
}

/// Replaces an attention module: the same projections, without attention and communication.
struct Mixer : nn::Module<Mixer> {
  explicit Mixer(const SmallLlamaConfig& c) : config(c) {
    const nn::LinearOptions options{.bias = c.bias};
    q = register_module("q", std::make_shared<nn::Linear>(c.dim, c.inner, options));
    k = register_module("k", std::make_shared<nn::Linear>(c.dim, c.inner, options));
    v = register_module("v", std::make_shared<nn::Linear>(c.dim, c.inner, options));
    o = register_module("o", std::make_shared<nn::Linear>(c.inner, c.dim, options));
  }
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> qkv = products_of(config, x, {*q, *k, *v});
    return (*o)(at::silu(qkv[0]).mul(qkv[1]).add(qkv[2]));
  }
  SmallLlamaConfig config;
  std::shared_ptr<nn::Linear> q, k, v, o;
};

struct GatedMlp : nn::Module<GatedMlp> {
  explicit GatedMlp(const SmallLlamaConfig& c) : config(c) {
    const nn::LinearOptions options{.bias = c.bias};
    gate = register_module("gate", std::make_shared<nn::Linear>(c.dim, c.hidden, options));
    up = register_module("up", std::make_shared<nn::Linear>(c.dim, c.hidden, options));
    down = register_module("down", std::make_shared<nn::Linear>(c.hidden, c.dim, options));
  }
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> gate_up = products_of(config, x, {*gate, *up});
    return (*down)(nn::silu_mul(gate_up[0], gate_up[1]));
  }
  SmallLlamaConfig config;
  std::shared_ptr<nn::Linear> gate, up, down;
};

struct LlamaBlock : nn::Module<LlamaBlock> {
  explicit LlamaBlock(const SmallLlamaConfig& c) : config(c) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x.add((*mixer)((*first_norm)(x)));
    return h.add((*mlp)((*second_norm)(h)));
  }
  SmallLlamaConfig config;
  nn::Child<nn::RMSNorm> first_norm{*this, "first_norm", config.dim};
  nn::Child<Mixer> mixer{*this, "mixer", config};
  nn::Child<nn::RMSNorm> second_norm{*this, "second_norm", config.dim};
  nn::Child<GatedMlp> mlp{*this, "mlp", config};
};

/// A small Llama without attention. Maps token ids (tokens) to logits (tokens, vocabulary).
struct SmallLlama : nn::Module<SmallLlama> {
  explicit SmallLlama(const SmallLlamaConfig& c = {}) {
    embed = register_module("embed", std::make_shared<nn::Embedding>(c.vocabulary, c.dim));
    for (int i = 0; i < c.depth; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<LlamaBlock>(c)));
    }
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(c.dim));
    head = register_module("head", std::make_shared<nn::Linear>(c.dim, c.vocabulary,
                                                                nn::LinearOptions{.bias = false}));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = (*embed)(tokens);
    for (const auto& block : blocks) {
      x = (*block)(x);
    }
    return (*head)((*norm)(x));
  }
  std::shared_ptr<nn::Embedding> embed;
  std::vector<std::shared_ptr<LlamaBlock>> blocks;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::Linear> head;
};

/// Returns the tensor-parallel plan. `regather`: backward gathers inputs that forward gathered.
inline tensor_parallel::ParallelizePlan plan_of_small_llama(bool sequence_parallel,
                                                            bool regather = true) {
  using namespace tensor_parallel;
  const Placement between = sequence_parallel ? Placement(Shard{0}) : Replicate{};
  const StylePtr norm = sequence_parallel ? tensor_parallel::sequence_parallel({.sequence_dim = 0})
                                          : tensor_parallel::replicate_parallel();
  const StylePtr gather = prepare_module_input(
      {.input_layouts = {between}, .desired_input_layouts = {Replicate{}}, .regather = regather});
  const StylePtr back = rowwise_parallel({.output_layouts = between, .use_local_output = false});
  const StylePtr width = colwise_parallel({.use_local_output = false});
  return {{"embed", rowwise_parallel({.input_layouts = Replicate{},
                                      .output_layouts = between,
                                      .use_local_output = false})},
          {"block*.*_norm", norm},
          {"block*.mixer", gather},
          {"block*.mixer.[qkv]", colwise_parallel()},
          {"block*.mixer.o", back},
          {"block*.mlp", gather},
          {"block*.mlp.gate", width},
          {"block*.mlp.up", width},
          {"block*.mlp.down", back},
          {"norm", norm},
          {"head", colwise_parallel({.input_layouts = between,
                                     .output_layouts = Shard{-1},
                                     .use_local_output = false,
                                     .regather = regather})}};
}

inline tensor_parallel::ParallelizePlan plan_of_block(bool regather) {
  const std::string blocks = "block*.";
  tensor_parallel::ParallelizePlan plan;
  for (const auto& [pattern, style] : plan_of_small_llama(true, regather)) {
    if (pattern.starts_with(blocks)) {
      plan.emplace_back(pattern.substr(blocks.size()), style);
    }
  }
  return plan;
}

}  // namespace tessera::testing
