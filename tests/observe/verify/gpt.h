#pragma once

// A small GPT with places for mistakes of users, and its verification on a mesh.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "tessera/observe/verify.h"
#include "tessera/tensor_parallel/block_plans.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/module_values.h"

namespace tessera::testing {

/// A Tap is the identity, unless a test plants a fault. It gets what the model's code gets.
using TapFunction = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& gain)>;

inline at::Tensor pass_on(const at::Tensor& x, const at::Tensor&) {
  return x;
}

struct GptOptions {
  double dropout = 0;
  TapFunction embedded = pass_on;  ///< (batch, tokens, hidden), the same on every rank
  TapFunction inner = pass_on;     ///< (batch, tokens, inner), with the local features of each rank
  /// The code of an MLP between its modules.
  std::function<at::Tensor(const at::Tensor& x)> between = [](const at::Tensor& x) { return x; };
  /// Whether a block leaves out its dropout.
  std::function<bool(const at::Tensor& x)> skips_drop = [](const at::Tensor&) { return false; };
};

inline constexpr std::int64_t kGptHidden = 12, kGptInner = 24, kGptVocabulary = 13;

class Tap : public nn::Module<Tap> {
 public:
  explicit Tap(TapFunction function) : function_(std::move(function)) {
    gain = register_slot("gain", {1});
    calls = register_buffer_slot("calls", {1});
    calls.slot()->set(at::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls->add_(1);
    return function_(x, *gain);
  }
  nn::Parameter gain, calls;

 private:
  TapFunction function_;
};

class GptMlp : public nn::Module<GptMlp> {
 public:
  explicit GptMlp(const GptOptions& o) : between_(o.between) {
    up = register_module("up", std::make_shared<nn::Linear>(kGptHidden, kGptInner));
    tap = register_module("tap", std::make_shared<Tap>(o.inner));
    down = register_module("down", std::make_shared<nn::Linear>(kGptInner, kGptHidden));
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)(between_((*tap)((*up)(x)).tanh())); }
  std::shared_ptr<nn::Linear> up, down;
  std::shared_ptr<Tap> tap;

 private:
  std::function<at::Tensor(const at::Tensor& x)> between_;
};

inline nn::AttentionOptions gpt_attention() {
  return {.hidden = kGptHidden, .heads = 6, .qkv_bias = true};
}

class GptBlock : public nn::Module<GptBlock> {
 public:
  explicit GptBlock(const GptOptions& o) : skips_drop_(o.skips_drop) {
    first_norm = register_module("first_norm", std::make_shared<nn::LayerNorm>(kGptHidden));
    attn = register_module("attn", std::make_shared<nn::Attention>(gpt_attention()));
    second_norm = register_module("second_norm", std::make_shared<nn::LayerNorm>(kGptHidden));
    mlp = register_module("mlp", std::make_shared<GptMlp>(o));
    drop = register_module("drop", std::make_shared<nn::Dropout>(o.dropout));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (skips_drop_(x)) {
      const at::Tensor h = x + (*attn)((*first_norm)(x));
      return h + (*mlp)((*second_norm)(h));
    }
    const at::Tensor h = x + (*drop)((*attn)((*first_norm)(x)));
    return h + (*drop)((*mlp)((*second_norm)(h)));
  }
  std::shared_ptr<nn::LayerNorm> first_norm, second_norm;
  std::shared_ptr<nn::Attention> attn;
  std::shared_ptr<GptMlp> mlp;
  std::shared_ptr<nn::Dropout> drop;

 private:
  std::function<bool(const at::Tensor& x)> skips_drop_;
};

/// tokens (batch, tokens) -> logits (batch, tokens, vocabulary).
class Gpt : public nn::Module<Gpt> {
 public:
  explicit Gpt(const GptOptions& o = {}) {
    embed = register_module("embed", std::make_shared<nn::Embedding>(kGptVocabulary, kGptHidden));
    tap = register_module("tap", std::make_shared<Tap>(o.embedded));
    for (const char* name : {"block0", "block1"}) {
      blocks.push_back(register_module(name, std::make_shared<GptBlock>(o)));
    }
    norm = register_module("norm", std::make_shared<nn::LayerNorm>(kGptHidden));
    head = register_module("head", std::make_shared<nn::Linear>(kGptHidden, kGptVocabulary));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = (*tap)((*embed)(tokens));
    for (const auto& block : blocks) {
      x = (*block)(x);
    }
    return (*head)((*norm)(x));
  }
  std::shared_ptr<nn::Embedding> embed;
  std::shared_ptr<Tap> tap;
  std::vector<std::shared_ptr<GptBlock>> blocks;
  std::shared_ptr<nn::LayerNorm> norm;
  std::shared_ptr<nn::Linear> head;
};

/// The style of a gain on local features, or none.
class TapStyle final : public tensor_parallel::ParallelStyle {
 public:
  std::string name() const override { return "tap"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    return {{module.slot("gain"), Replicate{}}};
  }
  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}
};

/// The plan, with or without sequence parallelism.
inline tensor_parallel::ParallelizePlan gpt_plan(bool sequence_parallel) {
  using namespace tensor_parallel;
  const Placement between = sequence_parallel ? Placement(Shard{1}) : Replicate{};
  const StylePtr norm = sequence_parallel ? tensor_parallel::sequence_parallel({.sequence_dim = 1})
                                          : replicate_parallel();
  const BlockPlanOptions block{.activations = between};
  const StylePtr tap = std::make_shared<TapStyle>();
  return joined(
      {embedding_plan("embed", block),
       attention_plan("block*.attn", gpt_attention(), block),
       {{"tap", tap},
        {"block*.*_norm", norm},
        {"block*.mlp", prepare_module_input(
                           {.input_layouts = {between}, .desired_input_layouts = {Replicate{}}})},
        {"block*.mlp.up", colwise_parallel({.use_local_output = false})},
        {"block*.mlp.tap", tap},
        {"block*.mlp.down",
         rowwise_parallel({.output_layouts = between, .use_local_output = false})},
        {"norm", norm},
        {"head", colwise_parallel({.input_layouts = between, .use_local_output = false})}}});
}

/// A model on a mesh of dp x tp ranks, with a reference of the same options.
struct GptRun {
  GptOptions options{};
  bool sequence_parallel = false;
  /// Changes the model after it is parallelized and filled.
  std::function<void(Gpt&, const DeviceMesh&)> plant = [](Gpt&, const DeviceMesh&) {};
  /// The function that is verified; nullptr: the loss.
  std::function<at::Tensor(Gpt&, const at::Tensor& tokens)> step{};
};

inline std::shared_ptr<Gpt> make_gpt(const GptRun& run, const DeviceMesh& mesh) {
  auto model = std::make_shared<Gpt>(run.options);
  fill(*model);
  if (mesh.size("tp") > 1) {
    tensor_parallel::parallelize_module(*model, mesh["tp"], gpt_plan(run.sequence_parallel));
  }
  if (mesh.size("dp") > 1) {
    for (const auto& block : model->blocks) {
      fsdp::fully_shard(*block, mesh["dp"]);
    }
    fsdp::fully_shard(*model, mesh["dp"]);
  }
  run.plant(*model, mesh);
  return model;
}

/// Two sequences of six tokens, different on each data-parallel rank.
inline at::Tensor gpt_tokens(const DeviceMesh& mesh) {
  return at::arange(12)
      .mul(7)
      .add(5 * mesh.local_rank("dp"))
      .remainder(kGptVocabulary)
      .view({2, 6});
}

inline at::Tensor gpt_loss(Gpt& model, const at::Tensor& tokens) {
  return tensor_parallel::cross_entropy(model(tokens).flatten(0, 1),
                                        tokens.add(1).remainder(kGptVocabulary).flatten());
}

inline observe::VerifyReport verify_gpt(Gpt& model, const GptRun& run, const DeviceMesh& mesh) {
  Gpt reference(run.options);
  const auto step = run.step ? run.step : gpt_loss;
  return observe::verify(model, reference, mesh,
                         [&](Gpt& gpt) { return step(gpt, gpt_tokens(mesh)); },
                         {.batch_dims = {"dp"}});
}

inline observe::VerifyReport verify_gpt(const GptRun& run, const DeviceMesh& mesh) {
  return verify_gpt(*make_gpt(run, mesh), run, mesh);
}

}  // namespace tessera::testing
