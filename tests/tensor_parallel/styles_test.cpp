// Compares each ParallelStyle on a mesh with the same module on one rank.

#include "tessera/dtensor/communication_scope.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::tensor_parallel {
namespace {

using testing::Filled;

TEST(Rowwise, ShardsAReplicatedPlainInput) {
  Filled<nn::Linear> alone(7, 5);
  const at::Tensor expected = uniform_values({3, 7}, 0.5).requires_grad_();
  alone(expected).square().sum().backward();
  RunRanks(4, [&](Rank& rank) {
    Filled<nn::Linear> linear(7, 5);
    parallelize_module(linear, rank.mesh({4}, {"tp"}), {{"", rowwise_parallel()}});
    const at::Tensor x = uniform_values({3, 7}, 0.5).requires_grad_();
    const at::Tensor y = linear(x);
    EXPECT_TRUE(full_tensor(y).allclose(alone(expected), 1e-5, 1e-5));
    y.square().sum().backward();
    EXPECT_FALSE(tessera::is_distributed(x.grad()));
    EXPECT_TRUE(x.grad().allclose(expected.grad(), 1e-5, 1e-5));
  });
}

TEST_ON_RANKS(Rowwise, AddsTheBiasOnceAndUnchanged, 3) {
  nn::Linear linear(6, 2);
  linear.weight->detach().zero_();
  linear.bias->detach().fill_(0.1);  // in fp32, bias / 3 added 3 times is not 0.1
  parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", rowwise_parallel()}});
  EXPECT_TRUE(full_tensor(linear(uniform_values({4, 6}, 1))).equal(at::full({4, 2}, 0.1f)));
}

TEST(Styles, RefuseInvalidCalls) {
  const at::Tensor x = uniform_values({3, 3}, 0.5);
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    Filled<nn::Linear> undeclared(6, 5), two_inputs(3, 2), other_mesh(3, 4);
    nn::Embedding embedding(10, 3);
    const DeviceMesh tp = mesh["tp"];
    parallelize_module(undeclared, tp, {{"", rowwise_parallel()}});
    parallelize_module(
        two_inputs, tp,
        {{"", prepare_module_input({.input_layouts = {Replicate{}, Replicate{}},
                                    .desired_input_layouts = {Replicate{}, Replicate{}}})}});
    parallelize_module(other_mesh, tp, {{"", colwise_parallel()}});
    const at::Tensor on_dp = distribute_tensor(x, mesh["dp"], {Replicate{}});
    testing::expect_refusals({
        {"a plain part that is not declared",
         [&] { undeclared(x); },
         {"rowwise_parallel", "6", "[3, 3]", "input_layouts = Shard{-1}"}},
        {"an embedding of split indices",
         [&] {
           parallelize_module(embedding, tp, {{"", rowwise_parallel({.input_layouts = Shard{0}})}});
         },
         {"rowwise_parallel", "Embedding", "input_layouts = Shard(0)"}},
        {"a call with too few tensors",
         [&] { two_inputs(x); },
         {"prepare_module_input", "2 tensors", "1"}},
        {"a tensor of another mesh", [&] { other_mesh(on_dp); }, {"(tp=2)", "(dp=2)"}},
    });
  });
}

TEST(Block, GathersAndScattersTwicePerPass) {
  RunOnMesh({4}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    Filled<testing::LlamaBlock> block(testing::SmallLlamaConfig{});
    // Frozen norms: the reductions of their gradients are not part of the expected traffic.
    block.first_norm->slot("weight")->get().set_requires_grad(false);
    block.second_norm->slot("weight")->get().set_requires_grad(false);
    parallelize_module(block, mesh, testing::plan_of_block(/*regather=*/true));
    const at::Tensor x = testing::leaf_on(mesh, uniform_values({10, 8}, 0.2), {Shard{0}});
    const auto expect_calls = [](const Sent& sent, std::int64_t gathers) {
      EXPECT_EQ(sent.calls("tp", "all_gather"), gathers);
      EXPECT_EQ(sent.calls("tp", "reduce_scatter"), 2);
      EXPECT_EQ(sent.calls(), gathers + 2);
    };
    const StrictScope strict;
    const Sent in_forward(rank);
    const at::Tensor y = block(x);
    expect_calls(in_forward, 2);
    const Sent in_backward(rank);
    DistributedTensor(y).to_local().square().sum().backward();
    expect_calls(in_backward, 4);
  });
}

using nn::FusedLinear;

std::vector<nn::FusedPart> query_key_value(std::int64_t query, std::int64_t key_value) {
  return {{"q_proj", query}, {"k_proj", key_value}, {"v_proj", key_value}};
}

TEST(FusedLinear, RefusesIndivisibleGroups) {
  EXPECT_ERROR(FusedLinear(5, query_key_value(16, 6), {.groups = 4}), "'k_proj'", "6 features",
               "4 equal groups");
  EXPECT_ERROR(FusedLinear(5, {}), "no parts");
  FusedLinear fused(5, query_key_value(16, 4));
  EXPECT_ERROR(fused.split(uniform_values({2, 12}, 0.5)), "12 features can't be split");
}

// Tests fused Linears with equal parts, and fused Linears with groups of unequal parts.
TEST(FusedColwise, GivesEachRankAShareOfEveryPart) {
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  const auto expect_share = [](const std::vector<at::Tensor>& parts,
                               const std::vector<at::Tensor>& whole, const Rank& rank) {
    for (std::size_t i = 0; i < 3; ++i) {
      const at::Tensor share =
          whole[i].chunk(rank.size(), -1)[static_cast<std::size_t>(rank.rank())];
      EXPECT_TRUE(local_tensor(parts[i]).allclose(share, 1e-5, 1e-6)) << i;
    }
  };
  Filled<nn::Linear> alone(5, 21);
  const std::vector<at::Tensor> thirds = alone(x).detach().chunk(3, -1);
  Filled<FusedLinear> alone_in_groups(5, query_key_value(16, 4), {.groups = 4});
  const std::vector<at::Tensor> of_groups = alone_in_groups.split(alone_in_groups(x).detach());
  for (const int ranks : {2, 3, 4}) {
    RunOnMesh({ranks}, {"tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<nn::Linear> linear(5, 21);
      parallelize_module(linear, mesh, {{"", fused_colwise_parallel({.parts = 3})}});
      expect_share(linear(x).chunk(3, -1), thirds, rank);
      if (ranks == 2) {
        Filled<FusedLinear> fused(5, query_key_value(16, 4), {.groups = 4});
        parallelize_module(fused, mesh, {{"", fused_colwise_parallel()}});
        expect_share(fused.split(fused(x)), of_groups, rank);
      }
    });
  }
}

TEST_ON_MESH(FusedColwise, RefusesIndivisibleParts, {2}, {"tp"}) {
  const auto apply = [&](nn::ModuleBase& module, const StylePtr& style) {
    parallelize_module(module, mesh, {{"", style}});
  };
  nn::Linear linear(5, 20);
  EXPECT_ERROR(apply(linear, fused_colwise_parallel()), "20 output features", ".parts = 0",
               ".parts = 3");
  EXPECT_ERROR(apply(linear, fused_colwise_parallel({.parts = 3})), ".parts = 3");
  FusedLinear unequal(5, query_key_value(16, 4));
  EXPECT_ERROR(apply(unequal, fused_colwise_parallel()), "'q_proj' and 'k_proj'", "16 and 4",
               ".groups");
  EXPECT_ERROR(apply(unequal, fused_colwise_parallel({.parts = 3})), ".parts = 3", "FusedLinear");
  EXPECT_ERROR(apply(unequal, colwise_parallel()), "fused_colwise_parallel()");
  FusedLinear groups(5, query_key_value(9, 3), {.groups = 3});
  EXPECT_ERROR(apply(groups, fused_colwise_parallel()), "3 groups", "2 ranks");
  EXPECT_FALSE(tessera::is_distributed(*groups.weight));
}

TEST_ON_MESH(FusedWeight, UnderFsdpIsShardedInEveryPart, {2, 2}, {"dp", "tp"}) {
  Filled<FusedLinear> fused(5, {{"gate", 6}, {"up", 6}});
  const at::Tensor whole = fused.weight->detach().clone();
  const at::Tensor bias = fused.bias->detach().clone();
  parallelize_module(fused, mesh["tp"], {{"", fused_colwise_parallel()}});
  fsdp::fully_shard(fused, mesh["dp"], {});
  const at::Tensor& shard = fused.weight.slot()->persistent();
  EXPECT_EQ(to_string(*sharding_spec(shard).layout), "[2 x 6:m1,m0 | -]");
  EXPECT_EQ(local_tensor(shard).size(0), mesh.local_rank(0) == 0 ? 4 : 2);
  EXPECT_TRUE(at::equal(full_tensor(shard), whole));
  EXPECT_TRUE(at::equal(full_tensor(fused.bias.slot()->persistent()), bias));
}

// split() of a distributed result, and backward of split(), must not communicate.
TEST(FusedColwise, SplitsResultsWithoutCommunication) {
  const at::Tensor values = uniform_values({4, 21}, 0.3);
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const StrictScope strict;
    for (const bool with_sizes : {false, true}) {
      at::Tensor x = distribute_tensor(values, mesh, {StridedShard{1, 3}}).tensor().detach();
      x.requires_grad_();
      const CommunicationScope communication(mesh);
      const std::vector<at::Tensor> parts =
          with_sizes ? x.split_with_sizes({7, 7, 7}, -1) : x.chunk(3, -1);
      ASSERT_EQ(parts.size(), 3U);
      EXPECT_EQ(DistributedTensor(parts[1]).placements(), Placements{Shard{1}});
      (parts[0] * parts[1] + parts[2]).square().sum().backward();
      EXPECT_EQ(communication.total().calls, 0);
      EXPECT_EQ(DistributedTensor(x.grad()).placements(), (Placements{StridedShard{1, 3}}));
      at::Tensor plain = values.clone().requires_grad_();
      const std::vector<at::Tensor> whole = plain.chunk(3, -1);
      (whole[0] * whole[1] + whole[2]).square().sum().backward();
      EXPECT_TRUE(full_tensor(parts[2]).allclose(whole[2]));
      EXPECT_TRUE(full_tensor(x.grad()).allclose(plain.grad(), 1e-5, 1e-6));
    }
  });
}

constexpr std::int64_t kWidth = 10, kHeadSize = 4;

struct Heads {
  std::int64_t queries, keys;
};

/// Attention on (tokens, kWidth). A norm is applied to each key head.
struct GroupedAttention : nn::Module<GroupedAttention> {
  explicit GroupedAttention(const Heads& heads) {
    q = register_module("q", std::make_shared<nn::Linear>(kWidth, heads.queries * kHeadSize));
    k = register_module("k", std::make_shared<nn::Linear>(kWidth, heads.keys * kHeadSize));
    v = register_module("v", std::make_shared<nn::Linear>(kWidth, heads.keys * kHeadSize));
    k_norm = register_module("k_norm", std::make_shared<nn::RMSNorm>(kHeadSize));
    o = register_module("o", std::make_shared<nn::Linear>(heads.queries * kHeadSize, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [](const at::Tensor& t) {
      return t.view({t.size(0), t.size(1) / kHeadSize, kHeadSize});
    };
    const at::Tensor out =
        at::scaled_dot_product_attention(heads((*q)(x)).transpose(0, 1).unsqueeze(0),
                                         (*k_norm)(heads((*k)(x))).transpose(0, 1).unsqueeze(0),
                                         heads((*v)(x)).transpose(0, 1).unsqueeze(0), std::nullopt,
                                         0.0, /*is_causal=*/true, std::nullopt, /*enable_gqa=*/true)
            .squeeze(0)
            .transpose(0, 1);
    return (*o)(out.flatten(1));
  }
  std::shared_ptr<nn::Linear> q, k, v, o;
  std::shared_ptr<nn::RMSNorm> k_norm;
};

std::unique_ptr<GroupedAttention> make_attention(const Heads& heads) {
  auto module = std::make_unique<GroupedAttention>(heads);
  testing::fill(*module);
  module->to(at::kDouble);
  return module;
}

/// `split_tokens`: whether the block's input is sharded by tokens (sequence parallelism).
ParallelizePlan plan_of(const Heads& heads, bool split_tokens) {
  const Placement between = split_tokens ? Placement(Shard{0}) : Replicate{};
  const StylePtr copies = replicated_heads_parallel({.heads = heads.keys});
  return {{"", prepare_module_input(
                   {.input_layouts = {between}, .desired_input_layouts = {Replicate{}}})},
          {"q", colwise_parallel()},
          {"k", copies},
          {"v", copies},
          {"k_norm", sequence_parallel({.sequence_dim = 1})},
          {"o", rowwise_parallel({.output_layouts = between})}};
}

TEST(ReplicatedHeads, HaveTheResultsAndGradientsOfOneRank) {
  struct HeadsCase {
    Heads heads;
    int ranks;
    bool split_tokens;
  };
  const at::Tensor whole = testing::values({7, kWidth}, 0.4);
  for (const HeadsCase& c :
       {HeadsCase{{8, 2}, 4, true}, HeadsCase{{4, 2}, 4, false}, HeadsCase{{6, 3}, 6, true},
        HeadsCase{{6, 1}, 3, true}, HeadsCase{{2, 2}, 2, false}}) {
    SCOPED_TRACE(::testing::Message() << c.heads.queries << " heads on " << c.ranks << " ranks");
    const auto alone = make_attention(c.heads);
    const at::Tensor expected_x = whole.clone().requires_grad_();
    const at::Tensor expected = (*alone)(expected_x);
    expected.square().sum().backward();
    RunOnMesh({c.ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      const Placements layout{c.split_tokens ? Placement(Shard{0}) : Replicate{}};
      const auto module = make_attention(c.heads);
      parallelize_module(*module, mesh, plan_of(c.heads, c.split_tokens));
      const auto expect_whole = [&](const at::Tensor& part, const at::Tensor& all) {
        const auto made = DistributedTensor::from_local(part, mesh, layout, all.sizes().vec());
        EXPECT_TRUE(made.full_tensor().allclose(all, 1e-10, 1e-10));
      };
      const StrictScope strict;
      const at::Tensor x =
          local_tensor(distribute_tensor(whole, mesh, layout)).clone().requires_grad_();
      const at::Tensor y = (*module)(x);
      y.square().sum().backward();
      expect_whole(local_tensor(y).detach(), expected.detach());
      expect_whole(x.grad(), expected_x.grad());
      testing::expect_gradients(*module, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
      for (const auto& [name, slot] : module->named_slots()) {
        EXPECT_EQ(sharding_spec(slot->get().grad()), sharding_spec(slot->get())) << name;
      }
    });
  }
}

TEST_ON_MESH(ReplicatedHeadsStyle, RefusesIndivisibleHeads, {4}, {"tp"}) {
  nn::Linear linear(5, 12);
  const auto of = [](std::int64_t heads) {
    return ParallelizePlan{{"", replicated_heads_parallel({.heads = heads})}};
  };
  EXPECT_ERROR(parallelize_module(linear, mesh, of(3)), "replicated_heads_parallel", "3 heads",
               "4 ranks");
  EXPECT_ERROR(parallelize_module(linear, mesh, of(8)), "12 output features", ".heads = 8");
  EXPECT_ERROR(parallelize_module(linear, mesh, of(0)), ".heads = 0");
  nn::Embedding embedding(4, 4);
  EXPECT_ERROR(parallelize_module(embedding, mesh, of(2)), "replicated_heads_parallel",
               "nn::Linear", "Embedding");
}

}  // namespace
}  // namespace tessera::tensor_parallel
