// Attention: the choice of a kernel, causal attention, and the blocks.

#include <ATen/ops/arange.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/softmax.h>

#include <array>
#include <cmath>
#include <optional>

#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/causal_attention.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/mlp.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using at::SDPBackend;

at::Tensor on_meta(std::int64_t heads) {
  return at::empty({2, heads, 5, 8}, at::device(at::kMeta));
}

/// As libtorch answers in fp32 on a GPU: a kernel for equal head counts alone.
SDPBackend equal_heads_only(const at::Tensor& q, const at::Tensor& k, const at::Tensor&) {
  return q.sizes() == k.sizes() ? SDPBackend::efficient_attention : SDPBackend::math;
}

TEST(ChooseAttention, RepeatsHeadsOnlyWhereThatLetsAKernelRun) {
  const auto always = [](SDPBackend backend) {
    return [backend](const at::Tensor&, const at::Tensor&, const at::Tensor&) { return backend; };
  };
  const auto chosen = [](std::int64_t kv_heads, const auto& ask) {
    const at::Tensor kv = on_meta(kv_heads);
    return to_string(tessera::detail::choose_attention(on_meta(4), kv, kv, ask));
  };
  EXPECT_EQ(chosen(2, equal_heads_only), "efficient, key-value heads repeated");
  EXPECT_EQ(chosen(2, always(SDPBackend::flash_attention)), "flash");
  EXPECT_EQ(chosen(2, always(SDPBackend::math)), "math");
  EXPECT_EQ(chosen(4, always(SDPBackend::math)), "math");
  const at::Tensor q = at::ones({2, 4, 5, 8}), kv = at::ones({2, 2, 5, 8});
  EXPECT_FALSE(tessera::detail::choose_attention(q, kv, kv, equal_heads_only).repeats_heads)
      << "a CPU is left to libtorch";
  EXPECT_EQ(to_string(attention_kernel(at::dtype(at::kFloat), 4, 4, 16, 8)), "flash");
}

TEST(MathAttention, IsRefusedUnlessItIsAllowed) {
  const at::Tensor q = on_meta(4), k = on_meta(2);
  tessera::detail::check_fused({SDPBackend::efficient_attention, true}, q, k, false);
  EXPECT_ERROR(tessera::detail::check_fused({SDPBackend::math}, q, k, true),
               "4 heads of 8 features over 5 tokens in Float with a mask on meta", "bf16",
               "nn::allow_math_attention()", "--allow-math-attention");
  allow_math_attention(true);
  EXPECT_NO_THROW(tessera::detail::check_fused({SDPBackend::math}, q, k, true));
  allow_math_attention(false);
}

using at::Tensor;

/// Lengths of documents, by sequence.
using Lengths = std::vector<std::vector<std::int64_t>>;

struct Packing {
  std::string name;
  Lengths lengths;
  std::int64_t window = 0;
  std::int64_t kv_heads = 4;
  std::int64_t width = 8;
};

std::ostream& operator<<(std::ostream& out, const Packing& packing) {
  return out << packing.name;
}

constexpr std::int64_t kHeads = 4;

Tensor positions_of(const Lengths& lengths) {
  std::vector<Tensor> rows;
  for (const std::vector<std::int64_t>& of_row : lengths) {
    std::vector<Tensor> row;
    for (const std::int64_t length : of_row) {
      row.push_back(at::arange(length, at::kLong));
    }
    rows.push_back(at::cat(row));
  }
  return at::stack(rows);
}

/// The oracle, pair by pair: which key a query sees.
Tensor mask_of(const Packing& packing) {
  std::vector<Tensor> masks;
  for (const std::vector<std::int64_t>& of_row : packing.lengths) {
    std::int64_t tokens = 0;
    for (const std::int64_t length : of_row) {
      tokens += length;
    }
    const Tensor mask = at::zeros({tokens, tokens}, at::kBool);
    auto seen = mask.accessor<bool, 2>();
    std::int64_t begin = 0;
    for (const std::int64_t length : of_row) {
      for (std::int64_t query = begin; query < begin + length; ++query) {
        for (std::int64_t key = begin; key <= query; ++key) {
          seen[query][key] = packing.window == 0 || query - key < packing.window;
        }
      }
      begin += length;
    }
    masks.push_back(mask);
  }
  return at::stack(masks).unsqueeze(1);
}

struct Inputs {
  Tensor q, k, v;
};

/// Leaves as projections make them: (batch, tokens, heads, width), heads in front by a view.
Inputs inputs_of(const Packing& packing) {
  const auto batch = std::ssize(packing.lengths);
  const std::int64_t tokens = positions_of(packing.lengths).size(1);
  const auto leaf = [&](std::int64_t heads, int seed) {
    return testing::values({batch, tokens, heads, packing.width}, seed).requires_grad_();
  };
  return {leaf(kHeads, 0), leaf(packing.kv_heads, 1), leaf(packing.kv_heads, 2)};
}

std::array<Tensor, 4> with_gradients(const Inputs& inputs, const Tensor& mixed) {
  mixed.mul(mixed.add(1)).sum().backward();
  return {mixed.detach(), inputs.q.grad(), inputs.k.grad(), inputs.v.grad()};
}

std::array<Tensor, 4> by_mask(const Packing& packing) {
  const Inputs t = inputs_of(packing);
  return with_gradients(t, attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                                     /*causal=*/false, mask_of(packing)));
}

DocumentsPtr documents_of(const Packing& packing) {
  return std::make_shared<const Documents>(positions_of(packing.lengths), at::kCPU);
}

class CausalAttention : public ::testing::TestWithParam<Packing> {};

TEST_P(CausalAttention, EqualsThatWithAMask) {
  const Packing& packing = GetParam();
  const Inputs t = inputs_of(packing);
  const std::array<Tensor, 4> results = with_gradients(
      t, causal_attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                          {.window = packing.window, .documents = documents_of(packing)}));
  const std::array<Tensor, 4> expected = by_mask(packing);
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].sizes(), expected[i].sizes());
    EXPECT_CLOSE(results[i], expected[i], 1e-10, 1e-12) << "of result " << i;
  }
}

TEST_P(CausalAttention, SaysTheSameByTheMaskOfItsDocuments) {
  const Packing& packing = GetParam();
  EXPECT_EQUAL(documents_of(packing)->mask(packing.window), mask_of(packing));
}

/// Each rank has two of the four heads, and sends nothing.
TEST_P(CausalAttention, EqualsThatWithAMaskOnSplitHeads) {
  const Packing& packing = GetParam();
  const std::array<Tensor, 4> expected = by_mask(packing);
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    Inputs t = inputs_of(packing);
    for (Tensor* tensor : {&t.q, &t.k, &t.v}) {
      *tensor =
          distribute_tensor(tensor->detach(), mesh, {Shard{2}}).tensor().detach().requires_grad_();
    }
    const StrictScope strict;
    const Tensor mixed =
        causal_attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                         {.window = packing.window, .documents = documents_of(packing)});
    const std::array<Tensor, 4> results = with_gradients(t, mixed);
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_CLOSE(results[i], expected[i], 1e-10, 1e-12) << "of result " << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Packings, CausalAttention,
    ::testing::Values(Packing{"OneDocument", {{9}}}, Packing{"ADocumentEach", {{9}, {9}}},
                      Packing{"Uneven", {{5, 1, 3}, {2, 7}, {9}}},
                      Packing{"OfOneToken", {{1, 1, 1, 1}, {1, 2, 1}}},
                      Packing{"GroupedHeads", {{5, 1, 3}, {2, 7}}, 0, 2},
                      Packing{"WidthOf6", {{5, 4}, {2, 7}}, 0, 2, 6},
                      Packing{"InAWindow", {{5, 1, 13}, {17, 2}}, 4, 2},
                      Packing{"WindowBeyondDocuments", {{5, 1, 3}, {2, 7}}, 8},
                      Packing{"WindowBeyondAll", {{9}, {9}}, 30},
                      Packing{"WindowOfOne", {{6, 3}, {9}}, 1},
                      Packing{"LongSequencesInAWindow", {{300}, {300}}, 5, 2},
                      Packing{"LongSequencesInALongWindow", {{500}}, 140, 2},
                      Packing{"LongDocumentsInAWindow", {{270, 30}, {1, 299}}, 40, 2},
                      Packing{"TailOfOneQuery", {{257}}, 128}),
    testing::name_of_case<Packing>);

TEST(CausalAttentionOf, Refusals) {
  const Tensor q = at::zeros({2, 4, 9, 8});
  const DocumentsPtr documents = documents_of({"", {{5, 3}, {8}}});
  EXPECT_ERROR(causal_attention(q, q, q, {.documents = documents}), "2 sequences of 9 tokens",
               "documents of 2 sequences of 8");
  // As many tokens, in other sequences.
  for (const Packing& other : {Packing{"", {{7, 11}}}, Packing{"", {{6}, {6}, {6}}}}) {
    EXPECT_ERROR(causal_attention(q, q, q, {.documents = documents_of(other)}),
                 "2 sequences of 9 tokens", "make them of the positions");
  }
  {
    const Tensor q = at::zeros({2, 4, 9, 8});
    for (const Tensor& other :
         {at::zeros({2, 3, 9, 8}), at::zeros({2, 0, 9, 8}), at::zeros({1, 4, 9, 8}),
          at::zeros({2, 4, 7, 8}), at::zeros({4, 9, 8})}) {
      EXPECT_ERROR(causal_attention(q, other, other, {.window = 3}),
                   "queries of sizes [2, 4, 9, 8]", "heads that divide them");
    }
    EXPECT_ERROR(causal_attention(q, q, q, {.window = -1}), "window of -1", "0 for all");
  }
}

/// The first block, which has as many queries as the window, needs none.
TEST(CausalAttentionOf, LongWindowKeepsAMaskOfASmallBlockAlone) {
  constexpr std::int64_t kWindow = 2048, kBlock = 512;
  const Tensor q = at::zeros({1, 1, 2 * kWindow, 8});
  std::int64_t largest = 0;
  const kernels::FakeMode fake(c10::DeviceType::CPU, [&](const kernels::FakeCall& call) {
    for (const Tensor& result : call.results) {
      largest = std::max(largest, result.numel());
    }
  });
  causal_attention(q, q, q, {.window = kWindow});
  EXPECT_EQ(largest, kBlock * (kBlock + kWindow - 1));
}

TEST_ON_MESH(CausalAttentionOf, SplitBatchesIsRefused, {2}, {"dp"}) {
  const Tensor q = distribute_tensor(at::zeros({2, 4, 9, 8}), mesh, {Shard{0}}).tensor();
  const DocumentsPtr documents = documents_of({"", {{5, 4}, {9}}});
  EXPECT_ERROR(causal_attention(q, q, q, {.documents = documents}), "split by heads alone");
}

TEST(CausalAttentionOf, NoSequencesIsEmpty) {
  const Tensor q = at::zeros({0, 4, 9, 8});
  const auto documents = std::make_shared<const Documents>(at::zeros({0, 9}, at::kLong), at::kCPU);
  EXPECT_EQ(causal_attention(q, q, q, {.documents = documents}).sizes(), q.sizes());
}

TEST(DocumentsOf, PositionsAreWhereTheyBegin) {
  const Documents documents(positions_of({{2, 3}, {5}, {1, 4}}), at::kCPU);
  EXPECT_EQ(documents.offsets(), (std::vector<std::int64_t>{0, 2, 5, 10, 11, 15}));
  EXPECT_EQ(documents.longest(), 5);
  EXPECT_FALSE(documents.are_sequences());
  EXPECT_EQUAL(documents.device_offsets(), at::tensor({0, 2, 5, 10, 11, 15}, at::kInt));
}

/// A part of a document may begin a sequence, at any position of it.
TEST(DocumentsOf, SequencesBeginWithOne) {
  const Documents documents(at::tensor({7, 8, 0, 3, 4, 5}, at::kLong).view({2, 3}), at::kCPU);
  EXPECT_EQ(documents.offsets(), (std::vector<std::int64_t>{0, 2, 3, 6}));
  EXPECT_TRUE(
      Documents(at::tensor({7, 8, 9, 3, 4, 5}, at::kLong).view({2, 3}), at::kCPU).are_sequences());
}

TEST(PackedKernel, IsFlashWhereCudnnWouldBeTaken) {
  EXPECT_EQ(to_string(packed_kernel({at::SDPBackend::cudnn_attention})), "flash");
  EXPECT_EQ(to_string(packed_kernel({at::SDPBackend::efficient_attention, true})),
            "efficient, key-value heads repeated");
}

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
      EXPECT_CLOSE(y, by_formula(attention, x, inputs), 1e-4, 1e-5)
          << options.heads << " heads, rotary " << rotary;
      // Folded, and with the tables of all tokens.
      AttentionInputs folded = inputs;
      folded.batch = kBatch;
      EXPECT_CLOSE(attention(x.flatten(0, 1), folded), y.flatten(0, 1), 1e-4, 1e-5);
      if (rotary) {
        folded.cos = inputs.cos.repeat({kBatch, 1});
        folded.sin = inputs.sin.repeat({kBatch, 1});
        EXPECT_CLOSE(attention(x.flatten(0, 1), folded), y.flatten(0, 1), 1e-4, 1e-5);
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
    EXPECT_CLOSE(fused(input(12)), separate(input(12)), 1e-5, 1e-6) << kv_heads;
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
  EXPECT_EQUAL(attention(input(12)), expected);
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
  EXPECT_CLOSE(gated(x),
               at::linear(gate * gate.sigmoid() * up, g["down_proj.weight"], g["down_proj.bias"]),
               1e-4, 1e-5);
  for (const bool tanh : {true, false}) {
    testing::Filled<GeluMlp> mlp(
        {.hidden = 6, .inner = 10, .names = {.up = "c_fc", .down = "c_proj"}}, tanh);
    const auto p = mlp.named_parameters();
    const at::Tensor inner = at::linear(x, p["c_fc.weight"]);
    const at::Tensor gelu =
        tanh ? 0.5 * inner * (1 + (std::sqrt(2 / M_PI) * (inner + 0.044715 * inner.pow(3))).tanh())
             : 0.5 * inner * (1 + at::erf(inner / std::sqrt(2.0)));
    EXPECT_CLOSE(mlp(x), at::linear(gelu, p["c_proj.weight"]), 1e-5, 1e-6);
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
