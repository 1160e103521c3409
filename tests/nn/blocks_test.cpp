// Attention and MLPs against their formulas. On meshes: tests/tensor_parallel/blocks_test.cpp.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/softmax.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/attention.h"
#include "tessera/nn/attention_kernel.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/mlp.h"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/values.h"

namespace tessera::nn {
namespace {

using testing::uniform_values;

constexpr std::int64_t kBatch = 2, kTokens = 5;

at::Tensor input(std::int64_t features) {
  return uniform_values({kBatch, kTokens, features}, 0.7);
}

AttentionInputs rotary_tables(std::int64_t head_dim) {
  const at::Tensor frequency = at::arange(1, head_dim / 2 + 1, at::kFloat).mul(0.3);
  const at::Tensor half = at::outer(at::arange(kTokens, at::kFloat), frequency);
  const at::Tensor angle = at::cat({half, half}, 1);
  return {.cos = angle.cos(), .sin = angle.sin()};
}

at::Tensor rms_normed(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x / (x.square().mean(-1, true) + eps).sqrt() * weight;
}

/// One head at a time, every score in memory.
at::Tensor by_formula(Attention& attention, const at::Tensor& x, const AttentionInputs& inputs) {
  const AttentionOptions& o = attention.options();
  const auto of = [&](const char* name) {
    const auto parameters = attention.named_parameters();
    const at::Tensor* bias = parameters.find(std::string(name) + ".bias");
    return at::linear(x, parameters[std::string(name) + ".weight"],
                      bias == nullptr ? std::nullopt : std::optional(*bias));
  };
  const auto head = [&](const at::Tensor& t, std::int64_t i, const char* norm) {
    at::Tensor h = t.narrow(-1, i * o.head_dim, o.head_dim);
    if (norm != nullptr && o.qk_norm) {
      h = rms_normed(h, attention.named_parameters()[norm], o.norm_eps);
    }
    if (norm == nullptr || !inputs.cos.defined()) {
      return h;
    }
    const std::vector<at::Tensor> halves = h.chunk(2, -1);
    return h * inputs.cos + at::cat({-halves[1], halves[0]}, -1) * inputs.sin;
  };
  const at::Tensor q = of("q_proj"), k = of("k_proj"), v = of("v_proj");
  at::Tensor hidden = at::arange(kTokens).unsqueeze(0) > at::arange(kTokens).unsqueeze(1);
  if (o.window > 0) {
    hidden =
        hidden | (at::arange(kTokens).unsqueeze(0) <= at::arange(kTokens).unsqueeze(1) - o.window);
  }
  std::vector<at::Tensor> mixed;
  for (std::int64_t i = 0; i < o.heads; ++i) {
    const std::int64_t kv = i / (o.heads / o.kv_heads);
    at::Tensor scores =
        head(q, i, "q_norm.weight").matmul(head(k, kv, "k_norm.weight").transpose(1, 2)) /
        std::sqrt(static_cast<double>(o.head_dim));
    if (o.causal) {
      scores = scores.masked_fill(hidden, -INFINITY);
    }
    mixed.push_back(at::softmax(scores, -1).matmul(head(v, kv, nullptr)));
  }
  const auto parameters = attention.named_parameters();
  const at::Tensor* bias = parameters.find("o_proj.bias");
  return at::linear(at::cat(mixed, -1), parameters["o_proj.weight"],
                    bias == nullptr ? std::nullopt : std::optional(*bias));
}

TEST(AttentionBlock, IsTheFormulaWithEachOption) {
  const std::vector<AttentionOptions> cases{
      {.hidden = 12, .heads = 3},
      {.hidden = 10, .heads = 4, .kv_heads = 2, .head_dim = 6, .qkv_bias = true, .qk_norm = true},
      {.hidden = 12, .heads = 3, .kv_heads = 1, .output_bias = true, .window = 2},
      {.hidden = 12, .heads = 2, .causal = false},
  };
  for (const AttentionOptions& options : cases) {
    for (const bool rotary : {false, true}) {
      testing::Filled<Attention> attention(options);
      const AttentionInputs inputs =
          rotary ? rotary_tables(attention.options().head_dim) : AttentionInputs{};
      const at::Tensor x = input(options.hidden);
      const at::Tensor y = attention(x, inputs);
      EXPECT_TRUE(y.allclose(by_formula(attention, x, inputs), 1e-4, 1e-5))
          << options.heads << " heads, rotary " << rotary;
      // Folded, and with the tables of all tokens.
      AttentionInputs folded = inputs;
      folded.batch = kBatch;
      EXPECT_TRUE(attention(x.flatten(0, 1), folded).allclose(y.flatten(0, 1), 1e-4, 1e-5));
      if (rotary) {
        folded.cos = inputs.cos.repeat({kBatch, 1});
        folded.sin = inputs.sin.repeat({kBatch, 1});
        EXPECT_TRUE(attention(x.flatten(0, 1), folded).allclose(y.flatten(0, 1), 1e-4, 1e-5));
      }
    }
  }
}

TEST(AttentionBlock, IsTheSameWithOneProjection) {
  for (const std::int64_t kv_heads : {4, 2}) {
    const AttentionOptions options{
        .hidden = 12, .heads = 4, .kv_heads = kv_heads, .qkv_bias = true, .fused_qkv = true};
    testing::Filled<Attention> fused(options);
    AttentionOptions apart = options;
    apart.fused_qkv = false;
    testing::Filled<Attention> separate(apart);
    const c10::NoGradGuard no_grad;
    // Its own split of the rows says which of them are whose.
    const auto& of_fused = dynamic_cast<FusedLinear&>(*fused.children()[0]);
    const auto parameters = separate.named_parameters();
    for (const char* name : {"weight", "bias"}) {
      const at::Tensor rows = fused.named_parameters()["qkv_proj." + std::string(name)];
      const std::vector<at::Tensor> parts = of_fused.split(rows.dim() == 2 ? rows.t() : rows);
      for (std::size_t i = 0; i < 3; ++i) {
        const std::string to = std::vector<std::string>{"q_proj.", "k_proj.", "v_proj."}[i] + name;
        parameters[to].copy_(rows.dim() == 2 ? parts[i].t() : parts[i]);
      }
    }
    parameters["o_proj.weight"].copy_(fused.named_parameters()["o_proj.weight"]);
    EXPECT_TRUE(fused(input(12)).allclose(separate(input(12)), 1e-5, 1e-6)) << kv_heads;
  }
}

TEST(AttentionBlock, DropsInTrainingOnly) {
  Attention attention({.hidden = 12, .heads = 4, .dropout = 0.5});
  Attention without({.hidden = 12, .heads = 4});
  testing::fill(attention);
  testing::fill(without);
  const at::Tensor expected = without(input(12));
  EXPECT_FALSE(attention(input(12)).allclose(expected, 1e-2, 1e-3));
  attention.eval();
  EXPECT_TRUE(attention(input(12)).equal(expected));
}

TEST(AttentionBlock, BeginsAsItsOptionsSay) {
  Attention attention({.hidden = 64,
                       .heads = 4,
                       .qkv_bias = true,
                       .qk_norm = true,
                       .init_std = 0.1,
                       .output_init_std = 0.01,
                       .names = {.query = "wq", .output = "wo"}});
  init_weights(attention, 1);
  const auto parameters = attention.named_parameters();
  EXPECT_NEAR(parameters["wq.weight"].std().item<double>(), 0.1, 0.005);
  EXPECT_NEAR(parameters["k_proj.weight"].std().item<double>(), 0.1, 0.005);
  EXPECT_NEAR(parameters["wo.weight"].std().item<double>(), 0.01, 0.0005);
  EXPECT_EQ(parameters["v_proj.bias"].abs().max().item<double>(), 0);
  EXPECT_EQ(parameters["q_norm.weight"].min().item<double>(), 1);
  EXPECT_FALSE(parameters.contains("wo.bias"));
}

TEST(AttentionBlock, RefusesSizesThatDoNotFit) {
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 5}), "5 heads", "12 features", "head_dim");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .kv_heads = 3}), "3 key and value heads");
  EXPECT_ERROR(Attention({.heads = 4}), "0 features");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .causal = false, .window = 2}), "window of 2",
               "pass a mask");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .kv_heads = -2}), "-2 key and value heads");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .head_dim = -3}), "-3 features");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .window = -1}), "window of -1", "below 0");
  for (const double dropout : {-0.1, 1.0, std::nan("")}) {
    EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .dropout = dropout}), "dropout of");
  }
  testing::Filled<Attention> attention({.hidden = 12, .heads = 4});
  EXPECT_ERROR(attention(input(12).flatten(0, 1)), "folded", "AttentionInputs::batch");
}

TEST(Mlps, AreTheirFormulas) {
  const at::Tensor x = input(6);
  testing::Filled<SwiGlu> gated({.hidden = 6, .inner = 10, .bias = true});
  const auto g = gated.named_parameters();
  const at::Tensor gate = at::linear(x, g["gate_proj.weight"], g["gate_proj.bias"]);
  const at::Tensor up = at::linear(x, g["up_proj.weight"], g["up_proj.bias"]);
  EXPECT_TRUE(gated(x).allclose(
      at::linear(gate * gate.sigmoid() * up, g["down_proj.weight"], g["down_proj.bias"]), 1e-4,
      1e-5));
  for (const bool tanh : {true, false}) {
    testing::Filled<GeluMlp> mlp(
        {.hidden = 6, .inner = 10, .names = {.up = "c_fc", .down = "c_proj"}}, tanh);
    const auto p = mlp.named_parameters();
    const at::Tensor inner = at::linear(x, p["c_fc.weight"]);
    const at::Tensor gelu =
        tanh ? 0.5 * inner * (1 + (std::sqrt(2 / M_PI) * (inner + 0.044715 * inner.pow(3))).tanh())
             : 0.5 * inner * (1 + at::erf(inner / std::sqrt(2.0)));
    EXPECT_TRUE(mlp(x).allclose(at::linear(gelu, p["c_proj.weight"]), 1e-5, 1e-6));
  }
}

TEST(Mlps, RefuseSizesBelowOne) {
  EXPECT_ERROR(SwiGlu({.hidden = 6}), "6 features and 0 within");
  EXPECT_ERROR(GeluMlp({.inner = 6}), "0 features and 6 within");
}

TEST(Mlps, BeginAsTheirOptionsSay) {
  SwiGlu mlp({.hidden = 64, .inner = 96, .bias = true, .init_std = 0.1, .output_init_std = 0.01});
  init_weights(mlp, 1);
  const auto parameters = mlp.named_parameters();
  EXPECT_NEAR(parameters["gate_proj.weight"].std().item<double>(), 0.1, 0.005);
  EXPECT_NEAR(parameters["down_proj.weight"].std().item<double>(), 0.01, 0.0005);
  EXPECT_EQ(parameters["up_proj.bias"].abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace tessera::nn
