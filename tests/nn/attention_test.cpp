// Tests attention: the choice of a kernel, causal attention, attention blocks, and sequences that
// are sharded over ranks. The expected results are attention on one rank in fp64.

#include <c10/core/InferenceMode.h>

#include <cmath>
#include <limits>
#include <optional>

#include "tessera/comm/detail/recording.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/blocks.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using at::SDPBackend;

at::Tensor on_meta(std::int64_t heads) {
  return at::empty({2, heads, 5, 8}, at::device(at::kMeta));
}

/// Accepts only equal numbers of query and key heads, as libtorch does in fp32 on a GPU.
SDPBackend equal_heads_only(const at::Tensor& q, const at::Tensor& k, const at::Tensor&) {
  return q.sizes() == k.sizes() ? SDPBackend::efficient_attention : SDPBackend::math;
}

TEST(ChooseAttention, RepeatsHeadsOnlyIfAKernelNeedsRepetition) {
  const auto always = [](SDPBackend backend) {
    return [backend](const at::Tensor&, const at::Tensor&, const at::Tensor&) { return backend; };
  };
  const auto chosen = [](std::int64_t kv_heads, const auto& ask) {
    const at::Tensor kv = on_meta(kv_heads);
    return detail::to_string(tessera::detail::choose_attention(on_meta(4), kv, kv, ask));
  };
  EXPECT_EQ(chosen(2, equal_heads_only), "efficient, key-value heads repeated");
  EXPECT_EQ(chosen(2, always(SDPBackend::flash_attention)), "flash");
  EXPECT_EQ(chosen(2, always(SDPBackend::math)), "math");
  EXPECT_EQ(chosen(4, always(SDPBackend::math)), "math");
  const at::Tensor q = at::ones({2, 4, 5, 8}), kv = at::ones({2, 2, 5, 8});
  EXPECT_FALSE(tessera::detail::choose_attention(q, kv, kv, equal_heads_only).repeats_heads)
      << "a CPU is left to libtorch";
  EXPECT_EQ(attention_kernel(at::dtype(at::kFloat), 4, 4, 16, 8), "flash");
}

TEST(MathAttention, IsRefusedUnlessAllowed) {
  const at::Tensor q = on_meta(4), k = on_meta(2);
  tessera::detail::check_fused({SDPBackend::efficient_attention, true}, q, k, false);
  EXPECT_ERROR(tessera::detail::check_fused({SDPBackend::math}, q, k, true),
               "4 heads of 8 features over 5 tokens in Float with a mask on meta", "bf16",
               "nn::allow_math_attention(true)", "--allow-math-attention");
  allow_math_attention(true);
  EXPECT_NO_THROW(tessera::detail::check_fused({SDPBackend::math}, q, k, true));
  allow_math_attention(false);
}

using at::Tensor;

/// For each sequence, the number of tokens of each document.
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

/// Returns the mask (batch, 1, queries, keys): true where the query attends to the key.
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

Inputs inputs_of(const Packing& packing) {
  const auto batch = std::ssize(packing.lengths);
  const std::int64_t tokens = testing::document_positions(packing.lengths).size(1);
  const auto leaf = [&](std::int64_t heads, int seed) {
    return testing::values({batch, tokens, heads, packing.width}, seed).requires_grad_();
  };
  return {leaf(kHeads, 0), leaf(packing.kv_heads, 1), leaf(packing.kv_heads, 2)};
}

std::vector<Tensor> with_gradients(const Inputs& inputs, const Tensor& mixed) {
  mixed.mul(mixed.add(1)).sum().backward();
  return {mixed.detach(), inputs.q.grad(), inputs.k.grad(), inputs.v.grad()};
}

std::vector<Tensor> by_mask(const Packing& packing) {
  const Inputs t = inputs_of(packing);
  return with_gradients(t, attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                                     /*causal=*/false, mask_of(packing)));
}

DocumentsPtr documents_of(const Packing& packing) {
  return std::make_shared<const Documents>(testing::document_positions(packing.lengths), at::kCPU);
}

Tensor causal(const Inputs& t, const Packing& packing) {
  return detail::causal_attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                                  {.window = packing.window, .documents = documents_of(packing)});
}

class CausalAttention : public ::testing::TestWithParam<Packing> {};

TEST_P(CausalAttention, EqualsMaskedAttention) {
  const Packing& packing = GetParam();
  const Inputs t = inputs_of(packing);
  EXPECT_EACH(with_gradients(t, causal(t, packing)), by_mask(packing), 1e-10, 1e-12);
}

TEST_P(CausalAttention, HasTheMaskOfItsDocuments) {
  const Packing& packing = GetParam();
  EXPECT_EQUAL(documents_of(packing)->mask(packing.window), mask_of(packing));
}

/// The heads are sharded: each rank has two of four heads. Attention needs no communication.
TEST_P(CausalAttention, EqualsMaskedAttentionOnSplitHeads) {
  const Packing& packing = GetParam();
  const std::vector<Tensor> expected = by_mask(packing);
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    Inputs t = inputs_of(packing);
    for (Tensor* tensor : {&t.q, &t.k, &t.v}) {
      *tensor = testing::leaf_on(mesh, tensor->detach(), {Shard{2}});
    }
    const StrictScope strict;
    EXPECT_EACH(with_gradients(t, causal(t, packing)), expected, 1e-10, 1e-12);
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

TEST(CausalAttentionInputs, AreChecked) {
  const Tensor q = at::zeros({2, 4, 9, 8});
  const DocumentsPtr documents = documents_of({"", {{5, 3}, {8}}});
  EXPECT_ERROR(detail::causal_attention(q, q, q, {.documents = documents}),
               "2 sequences of 9 tokens", "made for 2 sequences of 8");
  // These documents have the right number of tokens, but a wrong number of sequences.
  for (const Packing& other : {Packing{"", {{7, 11}}}, Packing{"", {{6}, {6}, {6}}}}) {
    EXPECT_ERROR(detail::causal_attention(q, q, q, {.documents = documents_of(other)}),
                 "2 sequences of 9 tokens", "from the input's positions");
  }
  {
    const Tensor q = at::zeros({2, 4, 9, 8});
    for (const Tensor& other :
         {at::zeros({2, 3, 9, 8}), at::zeros({2, 0, 9, 8}), at::zeros({1, 4, 9, 8}),
          at::zeros({2, 4, 7, 8}), at::zeros({4, 9, 8})}) {
      EXPECT_ERROR(detail::causal_attention(q, other, other, {.window = 3}),
                   "queries of sizes [2, 4, 9, 8]", "key and value heads");
    }
    EXPECT_ERROR(detail::causal_attention(q, q, q, {.window = -1}), "window of -1", "0 for all");
  }
}

/// Queries are processed in blocks of kBlock. A block's mask covers the block and the window.
TEST(CausalAttentionInputs, OfALongWindowNeedASmallMask) {
  constexpr std::int64_t kWindow = 2048, kBlock = 512;
  const Tensor q = at::zeros({1, 1, 2 * kWindow, 8});
  std::int64_t largest = 0;
  const kernels::FakeMode fake(c10::DeviceType::CPU, [&](const kernels::FakeCall& call) {
    for (const Tensor& result : call.results) {
      largest = std::max(largest, result.numel());
    }
  });
  detail::causal_attention(q, q, q, {.window = kWindow});
  EXPECT_EQ(largest, kBlock * (kBlock + kWindow - 1));
}

TEST_ON_MESH(CausalAttentionInputs, WithSplitBatchesAreRefused, {2}, {"dp"}) {
  const Tensor q = distribute_tensor(at::zeros({2, 4, 9, 8}), mesh, {Shard{0}}).tensor();
  const DocumentsPtr documents = documents_of({"", {{5, 4}, {9}}});
  EXPECT_ERROR(detail::causal_attention(q, q, q, {.documents = documents}),
               "split over heads only");
}

TEST(CausalAttentionInputs, MayBeEmpty) {
  const Tensor q = at::zeros({0, 4, 9, 8});
  const auto documents = std::make_shared<const Documents>(at::zeros({0, 9}, at::kLong), at::kCPU);
  EXPECT_EQ(detail::causal_attention(q, q, q, {.documents = documents}).sizes(), q.sizes());
}

TEST(Documents, BeginAtPositionZero) {
  const Documents documents(testing::document_positions({{2, 3}, {5}, {1, 4}}), at::kCPU);
  EXPECT_EQ(documents.offsets(), (std::vector<std::int64_t>{0, 2, 5, 10, 11, 15}));
  EXPECT_EQ(documents.longest(), 5);
  EXPECT_FALSE(documents.are_sequences());
  EXPECT_EQUAL(documents.device_offsets(), at::tensor({0, 2, 5, 10, 11, 15}, at::kInt));
}

/// A sequence always begins a new document, even if its first position is not 0.
TEST(Documents, BeginWithEachSequence) {
  const Documents documents(at::tensor({7, 8, 0, 3, 4, 5}, at::kLong).view({2, 3}), at::kCPU);
  EXPECT_EQ(documents.offsets(), (std::vector<std::int64_t>{0, 2, 3, 6}));
  EXPECT_TRUE(
      Documents(at::tensor({7, 8, 9, 3, 4, 5}, at::kLong).view({2, 3}), at::kCPU).are_sequences());
}

TEST(PackedKernel, UsesFlashInsteadOfCudnn) {
  using detail::packed_kernel;
  EXPECT_EQ(detail::to_string(packed_kernel({at::SDPBackend::cudnn_attention})), "flash");
  EXPECT_EQ(detail::to_string(packed_kernel({at::SDPBackend::efficient_attention, true})),
            "efficient, key-value heads repeated");
}

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

/// Computes attention by the formula softmax(q k^T / sqrt(width)) v.
at::Tensor attention_of_one_rank(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& seen) {
  const std::int64_t group = q.size(1) / k.size(1);
  const at::Tensor scores = q.matmul(k.repeat_interleave(group, 1).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(q.size(3)));
  return scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity())
      .softmax(-1)
      .matmul(v.repeat_interleave(group, 1));
}

at::Tensor by_formula(Attention& attention, const at::Tensor& x, const AttentionInputs& inputs) {
  const AttentionOptions& o = attention.options();
  const auto parameters = attention.named_parameters();
  const auto product = [&](const at::Tensor& in, const std::string& name) {
    const at::Tensor* bias = parameters.find(name + ".bias");
    return at::linear(in, parameters[name + ".weight"],
                      bias == nullptr ? std::nullopt : std::optional(*bias));
  };
  const auto heads = [&](const char* name, const char* norm) {
    at::Tensor h = product(x, name).unflatten(-1, {-1, o.head_dim}).transpose(1, 2);
    if (norm != nullptr && o.qk_norm) {
      h = rms_normed(h, parameters[norm], o.norm_eps);
    }
    if (norm == nullptr || !inputs.cos.defined()) {
      return h;
    }
    const std::vector<at::Tensor> halves = h.chunk(2, -1);
    return h * inputs.cos + at::cat({-halves[1], halves[0]}, -1) * inputs.sin;
  };
  const at::Tensor back = at::arange(kTokens).unsqueeze(1) - at::arange(kTokens);
  at::Tensor seen = o.causal ? back.ge(0) : at::ones({kTokens, kTokens}, at::kBool);
  if (o.window > 0) {
    seen = seen.logical_and(back.lt(o.window));
  }
  const at::Tensor mixed =
      attention_of_one_rank(heads("q_proj", "q_norm.weight"), heads("k_proj", "k_norm.weight"),
                            heads("v_proj", nullptr), seen);
  return product(mixed.transpose(1, 2).flatten(2), "o_proj");
}

TEST(AttentionBlock, MatchesTheFormulaWithEachOption) {
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
      // x.flatten() joins batch and tokens, so attention repeats the rotary tables for each
      // sequence.
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

TEST(AttentionBlock, GivesEqualResultsWithAFusedProjection) {
  for (const std::int64_t kv_heads : {4, 2}) {
    const AttentionOptions options{
        .hidden = 12, .heads = 4, .kv_heads = kv_heads, .qkv_bias = true, .fused_qkv = true};
    testing::Filled<Attention> fused(options);
    AttentionOptions apart = options;
    apart.fused_qkv = false;
    testing::Filled<Attention> separate(apart);
    const c10::NoGradGuard no_grad;
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

TEST(AttentionBlock, AppliesDropoutOnlyInTraining) {
  Attention attention({.hidden = 12, .heads = 4, .dropout = 0.5});
  Attention without({.hidden = 12, .heads = 4});
  testing::fill(attention);
  testing::fill(without);
  const at::Tensor expected = without(input(12));
  EXPECT_FALSE(attention(input(12)).allclose(expected, 1e-2, 1e-3));
  attention.eval();
  EXPECT_EQUAL(attention(input(12)), expected);
}

TEST(AttentionBlock, InitializesWithTheGivenStd) {
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

TEST(AttentionBlock, RefusesInvalidOptions) {
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 5}), "5 heads", "12 features", "head_dim");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .kv_heads = 3}), "3 key and value heads");
  EXPECT_ERROR(Attention({.heads = 4}), "0 features");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .causal = false, .window = 2}), "window of 2",
               "pass a mask");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .kv_heads = -2}), "-2 key and value heads");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .head_dim = -3}), "-3 features");
  EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .window = -1}), "window of -1");
  for (const double dropout : {-0.1, 1.0, std::nan("")}) {
    EXPECT_ERROR(Attention({.hidden = 12, .heads = 4, .dropout = dropout}), "dropout of");
  }
  testing::Filled<Attention> attention({.hidden = 12, .heads = 4});
  EXPECT_ERROR(attention(input(12).flatten(0, 1)), "[10, 12]", "AttentionInputs::batch");
}

TEST(Mlps, MatchTheFormulas) {
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
  EXPECT_ERROR(SwiGlu({.hidden = 6}), "6 features and 0 inner features");
  EXPECT_ERROR(GeluMlp({.inner = 6}), "0 features and 6 inner features");
}

TEST(Mlps, InitializeWithTheGivenStd) {
  SwiGlu mlp({.hidden = 64, .inner = 96, .bias = true, .init_std = 0.1, .output_init_std = 0.01});
  init_weights(mlp, 1);
  const auto parameters = mlp.named_parameters();
  EXPECT_NEAR(parameters["gate_proj.weight"].std().item<double>(), 0.1, 0.005);
  EXPECT_NEAR(parameters["down_proj.weight"].std().item<double>(), 0.01, 0.0005);
  EXPECT_EQ(parameters["up_proj.bias"].abs().max().item<double>(), 0);
}

ContextParallelPtr split_over(const Rank& rank) {
  return std::make_shared<ContextParallel>(rank.mesh({rank.size()}, {"cp"}));
}

TEST(ContextParallel, BalancesQueryKeyPairs) {
  constexpr std::int64_t kTokens = 48;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    std::vector<at::Tensor> positions(static_cast<std::size_t>(ranks));
    RunRanks(ranks, [&](Rank& rank) {
      positions[static_cast<std::size_t>(rank.rank())] =
          split_over(rank)->positions(kTokens, at::kCPU);
    });
    for (const at::Tensor& own : positions) {
      // In causal attention, the query at position p has p + 1 keys. The total number of keys must
      // be equal on all ranks.
      EXPECT_EQ((own + 1).sum().item<std::int64_t>() * ranks, kTokens * (kTokens + 1) / 2);
    }
    EXPECT_EQUAL(std::get<0>(at::cat(positions).sort()), at::arange(kTokens));
  }
}

TEST_ON_RANKS(ContextParallel, UnshardRestoresShardedTensors, 3) {
  const ContextParallelPtr split = split_over(rank);
  const at::Tensor whole = testing::values({2, 12, 3}).requires_grad_();
  const at::Tensor part = split->shard(whole, -2);
  EXPECT_EQUAL(part, whole.index_select(1, split->positions(12, at::kCPU)));
  const at::Tensor again = split->unshard(part, 1);
  EXPECT_EQUAL(again, whole);
  const at::Tensor tokens = at::arange(24).view({12, 2});
  EXPECT_EQUAL(split->unshard(split->shard(tokens, 0), 0), tokens);
  // Rank r multiplies its loss by r + 1: on three ranks gradients have the factor 1 + 2 + 3 = 6.
  const at::Tensor weights = testing::values({2, 12, 3}, 5);
  (again * weights * (rank.rank() + 1)).sum().backward();
  EXPECT_CLOSE(split->shard(whole.grad(), 1), split->shard(weights * 6, 1), 1e-12, 1e-12);
}

struct SplitAttention {
  std::int64_t kv_heads;
  ContextAttentionOptions options{};
  bool masked = false;  ///< `masked`: a random mask instead of a causal mask
  std::int64_t batch = 2, width = 4;
  at::ScalarType type = at::kDouble;
  Lengths documents{};  ///< empty: each sequence is one document
};

/// Returns the mask (tokens, tokens): true where the query (row) sees the key (column).
at::Tensor seen_keys(const SplitAttention& c, const at::Tensor& mask, std::int64_t tokens) {
  if (c.masked) {
    return mask;
  }
  if (!c.options.causal) {
    return at::ones({tokens, tokens}, at::kBool);
  }
  return mask_of({"", c.documents.empty() ? Lengths{{tokens}} : c.documents, c.options.window});
}

class AttentionOfSplitSequences : public ::testing::TestWithParam<SplitAttention> {};

TEST_P(AttentionOfSplitSequences, EqualsAttentionOfOneRank) {
  constexpr std::int64_t kHeads = 6, kTokens = 24;
  const SplitAttention& c = GetParam();
  // Rounds to `type` first, so that the fp64 reference has the same inputs as the test case.
  const auto drawn = [&](std::int64_t heads, int seed) {
    const at::Tensor numbers = testing::values({c.batch, heads, kTokens, c.width}, seed);
    return numbers.to(c.type).to(at::kDouble).requires_grad_();
  };
  const at::Tensor q = drawn(kHeads, 0), k = drawn(c.kv_heads, 1), v = drawn(c.kv_heads, 2);
  const at::Tensor weights = testing::values(q.sizes(), 3).to(c.type).to(at::kDouble);
  const at::Tensor mask = testing::values({c.batch, 1, kTokens, kTokens}, 4) > -0.2;
  const at::Tensor expected = attention_of_one_rank(q, k, v, seen_keys(c, mask, kTokens));
  (expected * weights).sum().backward();
  const double error = c.type == at::kDouble ? 1e-10 : (c.type == at::kFloat ? 1e-5 : 3e-2);
  for (const int ranks : {1, 2, 3, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      const StrictScope strict;
      const ContextParallelPtr split = split_over(rank);
      std::vector<at::Tensor> own;
      for (const at::Tensor& whole : {q, k, v}) {
        own.push_back(split->shard(whole.detach(), 2).to(c.type).requires_grad_());
      }
      ContextAttentionOptions options = c.options;
      if (c.masked) {
        options.mask = split->shard(mask, 2);
      }
      if (!c.documents.empty()) {
        options.documents = documents_of({"", c.documents});
      }
      const at::Tensor y = split->attention(own[0], own[1], own[2], options);
      EXPECT_EQ(y.scalar_type(), c.type);
      EXPECT_CLOSE(y.to(at::kDouble), split->shard(expected, 2), error, error);
      (y * split->shard(weights, 2).to(c.type)).sum().backward();
      std::size_t i = 0;
      for (const at::Tensor& whole : {q, k, v}) {
        const at::Tensor gradient = own[i++].grad().to(at::kDouble);
        EXPECT_CLOSE(gradient, split->shard(whole.grad(), 2), error, error) << i << " on " << ranks;
      }
    });
  }
}

// Some windows are longer than a chunk (12, 6, 4 or 3 tokens), and some windows are shorter.
INSTANTIATE_TEST_SUITE_P(
    , AttentionOfSplitSequences,
    ::testing::Values(SplitAttention{6}, SplitAttention{2}, SplitAttention{3, {.window = 2}},
                      SplitAttention{1, {.window = 1}}, SplitAttention{2, {.window = 4}},
                      SplitAttention{2, {.window = 6}}, SplitAttention{3, {.window = 7}},
                      SplitAttention{2, {.window = 11}}, SplitAttention{2, {.window = 13}},
                      SplitAttention{6, {.window = 23}}, SplitAttention{6, {.window = 24}},
                      SplitAttention{1, {.causal = false}}, SplitAttention{2, {}, true},
                      SplitAttention{2, {}, false, 1, 24, at::kFloat},
                      SplitAttention{6, {}, false, 1, 3, at::kFloat},
                      SplitAttention{1, {.window = 7}, false, 3, 24, at::kFloat},
                      SplitAttention{2, {}, false, 1, 24, at::kBFloat16},
                      SplitAttention{3, {.window = 9}, false, 1, 16, at::kBFloat16}));

// One document has one token. Others end inside a chunk or with a chunk, or span several chunks.
INSTANTIATE_TEST_SUITE_P(
    OfDocuments, AttentionOfSplitSequences,
    ::testing::Values(
        SplitAttention{6, {}, false, 2, 4, at::kDouble, {{7, 17}, {24}}},
        SplitAttention{2, {}, false, 2, 4, at::kDouble, {{24}, {24}}},
        SplitAttention{1, {}, false, 2, 4, at::kDouble, {{1, 1, 22}, {12, 12}}},
        SplitAttention{3, {.window = 5}, false, 2, 4, at::kDouble, {{3, 20, 1}, {2, 9, 13}}},
        SplitAttention{2, {.window = 13}, false, 1, 8, at::kFloat, {{23, 1}}},
        SplitAttention{2, {}, false, 3, 16, at::kBFloat16, {{6, 6, 6, 6}, {5, 14, 5}, {24}}}));

TEST_ON_RANKS(ContextParallel, SendsKeysAndValuesInOneGather, 2) {
  const ContextParallelPtr split = split_over(rank);
  const at::Tensor q = at::ones({1, 4, 6, 8}).requires_grad_();
  const at::Tensor kv = at::ones({1, 2, 6, 8}).requires_grad_();
  const Sent traffic(rank);
  const comm::CallRecorder recorder(rank.world()->traffic());
  split->attention(q, kv, kv * 2).sum().backward();
  const comm::TrafficTable sent = traffic.table();
  const std::int64_t bytes = 2 * kv.numel() * 4;
  EXPECT_EQ(sent.size(), 2U);
  EXPECT_EQ(sent.at({"cp", "all_gather"}).calls, 1);
  EXPECT_EQ(sent.at({"cp", "all_gather"}).bytes, bytes);
  EXPECT_EQ(sent.at({"cp", "reduce_scatter"}).calls, 1);
  EXPECT_EQ(sent.at({"cp", "reduce_scatter"}).bytes, 2 * bytes);
  const auto calls = recorder.calls();
  EXPECT_EQ(calls.at(0).purpose, "keys and values");
  EXPECT_EQ(calls.at(1).purpose, "keys and values");
}

TEST_ON_MESH(ContextParallel, CombinesWithTensorParallelHeads, {2, 2}, {"cp", "tp"}) {
  const at::Tensor q = testing::values({2, 4, 12, 8}).requires_grad_();
  const at::Tensor kv = testing::values({2, 2, 12, 8}, 1).requires_grad_();
  const at::Tensor causal = detail::causal_mask(12, 0, at::kCPU);
  const at::Tensor expected = attention_of_one_rank(q, kv, kv * 2, causal);
  expected.square().sum().backward();
  ContextParallel split(mesh["cp"]);
  const auto of_heads = [&](const at::Tensor& whole) {
    const at::Tensor own = split.shard(whole.detach(), 2);
    return testing::leaf_on(mesh["tp"], own, {Shard{1}});
  };
  const at::Tensor own_q = of_heads(q), own_kv = of_heads(kv);
  const at::Tensor y = split.attention(own_q, own_kv, own_kv * 2);
  EXPECT_CLOSE(y, split.shard(expected, 2), 1e-10, 1e-12);
  y.square().sum().backward();
  for (const auto& [own, whole] : {std::pair(own_q, q), std::pair(own_kv, kv)}) {
    EXPECT_CLOSE(own.grad(), split.shard(whole.grad(), 2), 1e-10, 1e-12);
  }
}

TEST_ON_RANKS(ContextParallel, GivesEqualResultsInTrainingAndEvaluation, 2) {
  const ContextParallelPtr split = split_over(rank);
  const auto whole = testing::values({1, 2, 12, 4});
  const auto attend = [&](const at::Tensor& own) {
    return split->attention(own, own, own, {.window = 4});
  };
  at::Tensor evaluated;
  {
    const c10::InferenceMode inference;
    evaluated = attend(split->shard(whole, 2));
  }
  const at::Tensor own = split->shard(whole, 2).requires_grad_();
  const at::Tensor y = attend(own);
  EXPECT_EQUAL(y.detach(), evaluated);
  y.sum().backward();
  EXPECT_TRUE(own.grad().defined());
}

TEST_ON_RANKS(ContextParallel, RefusesUnsuitableSizes, 3) {
  const ContextParallelPtr split = split_over(rank);
  EXPECT_ERROR(split->positions(10, at::kCPU), "10 tokens", "3 context-parallel ranks",
               "multiple of 6");
  EXPECT_ERROR(split->shard(at::ones({2, 9}), 1), "9 tokens", "multiple of 6");
  EXPECT_ERROR(split->unshard(at::ones({2, 3}), 1), "9 tokens", "multiple of 6");
  EXPECT_ERROR(split->shard(at::ones({2, 6}), 2), "dimension 2", "[2, 6]");
  EXPECT_ERROR(ContextParallel(rank.mesh({3, 1}, {"a", "b"})), "mesh[\"cp\"]");
  const at::Tensor q = at::ones({1, 2, 4, 8}), odd = at::ones({1, 2, 3, 8});
  EXPECT_ERROR(split->attention(odd, odd, odd), "3 tokens", "shard()");
  EXPECT_ERROR(split->attention(q, odd, odd), "[1, 2, 4, 8]", "[1, 2, 3, 8]");
  EXPECT_ERROR(split->attention(q, q, q.slice(3, 4)), "values of [1, 2, 4, 4]");
  const at::Tensor none = at::ones({1, 0, 4, 8});
  EXPECT_ERROR(split->attention(q, none, none), "keys of [1, 0, 4, 8]", "key and value heads");
  EXPECT_ERROR(split->attention(q, q, q, {.window = -2}), "window of -2");
  EXPECT_ERROR(split->attention(q, q, q.to(at::kDouble)), "in Float", "in Double", "equal");
  EXPECT_ERROR(split->attention(q, q, q, {.causal = false, .window = 2}), "window of 2",
               "window of 2", "set causal");
  const auto documents = [](std::vector<std::int64_t> positions) {
    const std::int64_t tokens = std::ssize(positions);
    return std::make_shared<const Documents>(at::tensor(positions).view({1, tokens}), at::kCPU);
  };
  EXPECT_ERROR(split->attention(q, q, q, {.documents = documents({0, 1, 2, 0})}),
               "1 sequences of 12 tokens", "made for 1 sequences of 4");
  const DocumentsPtr two = documents({0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_ERROR(split->attention(q, q, q, {.causal = false, .documents = two}), "not causal",
               "one mask");
  EXPECT_ERROR(split->attention(q, q, q, {.mask = at::ones({4, 12}, at::kBool), .documents = two}),
               "documents and a mask");
  const DeviceMesh mesh = rank.mesh({3}, {"cp"});
  const at::Tensor whole = distribute_tensor(q, mesh, {Replicate{}});
  EXPECT_ERROR(split->attention(whole, q, q), "plain", "split over batch and heads only");
  const at::Tensor tokens = distribute_tensor(q, mesh, {Shard{2}});
  EXPECT_ERROR(split->attention(tokens, tokens, tokens), "split over batch and heads only");
  // With sharded sequences, dropout would drop different elements than on one rank.
  Attention block({.hidden = 4, .heads = 2, .dropout = 0.5});
  init_weights(block, 0);
  EXPECT_ERROR(block(at::ones({1, 4, 4}), AttentionInputs{.context_parallel = split}),
               "dropout of 0.5", "split");
  block.eval();
  EXPECT_EQ(block(at::ones({1, 4, 4}), AttentionInputs{.context_parallel = split}).size(1), 4);
}

TEST(ContextParallel, FailsOnAllRanksIfTokenCountsDiffer) {
  const std::vector<std::string> errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const at::Tensor q = at::ones({1, 2, rank.rank() == 0 ? 4 : 3, 8});
    split_over(rank)->attention(q, q, q);
  });
  EXPECT_CONTAINS(errors[1], "3 tokens");
  EXPECT_NE(errors[0], "");
}

}  // namespace
}  // namespace tessera::nn
