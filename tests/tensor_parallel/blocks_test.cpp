// The blocks of nn under their plans. The oracle is one rank, in fp64.
#include "tessera/tensor_parallel/block_plans.h"

#include "tessera/dtensor/manual_seed.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::full_tensor;

constexpr std::int64_t kHidden = 12, kSequences = 2, kPositions = 6;

struct BlockCase {
  nn::AttentionOptions attention;
  bool folded = false;
  bool sequence_parallel = false;
  bool gated = false;
};

/// A norm, attention and an MLP whose width no number of ranks here divides.
struct OneBlock final : nn::Module<OneBlock> {
  explicit OneBlock(const BlockCase& c) : options(c) {
    norm = register_module("norm", std::make_shared<nn::LayerNorm>(kHidden));
    attn = register_module("attn", std::make_shared<nn::Attention>(c.attention));
    const nn::MlpOptions mlp{.hidden = kHidden, .inner = 13, .bias = true};
    if (c.gated) {
      gated = register_module("mlp", std::make_shared<nn::SwiGlu>(mlp));
    } else {
      gelu = register_module("mlp", std::make_shared<nn::GeluMlp>(mlp));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const nn::AttentionInputs inputs{.batch = options.folded ? kSequences : 0};
    const at::Tensor h = x + (*attn)((*norm)(x), inputs);
    return options.gated ? (*gated)(h) : (*gelu)(h);
  }
  BlockCase options;
  std::shared_ptr<nn::LayerNorm> norm;
  std::shared_ptr<nn::Attention> attn;
  std::shared_ptr<nn::SwiGlu> gated;
  std::shared_ptr<nn::GeluMlp> gelu;
};

ParallelizePlan plan_of(const BlockCase& c) {
  const Placement between = c.sequence_parallel ? Placement(Shard{c.folded ? 0 : 1}) : Replicate{};
  const StylePtr norm = c.sequence_parallel ? sequence_parallel({.sequence_dim = c.folded ? 0 : 1})
                                            : replicate_parallel();
  return joined({{{"norm", norm}},
                 attention_plan("attn", c.attention, {.activations = between}),
                 c.gated ? swi_glu_plan("mlp", {}, {.activations = between})
                         : gelu_mlp_plan("mlp", {}, {.activations = between})});
}

at::Tensor input_of(const BlockCase& c) {
  const at::Tensor x =
      testing::uniform_values({kSequences, kPositions, kHidden}, 0.3).to(at::kDouble);
  return c.folded ? x.flatten(0, 1) : x;
}

class BlockOnRanks : public ::testing::TestWithParam<BlockCase> {};

TEST_P(BlockOnRanks, ComputesWhatOneRankDoes) {
  const BlockCase& c = GetParam();
  OneBlock alone(c);
  alone.to(at::kDouble);
  testing::fill(alone);
  const at::Tensor expected = alone(input_of(c));
  expected.square().mean().backward();
  for (const int ranks : {2, 3}) {
    if (alone.attn->options().kv_heads % ranks != 0) {
      continue;
    }
    RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
      const StrictScope strict;
      OneBlock model(c);
      model.to(at::kDouble);
      testing::fill(model);
      parallelize_module(model, mesh, plan_of(c));
      const Placement place =
          c.sequence_parallel ? Placement(Shard{c.folded ? 0 : 1}) : Replicate{};
      const at::Tensor y =
          DistributedTensor(model(distribute_tensor(input_of(c), mesh, {place}))).full_tensor();
      EXPECT_TRUE(y.allclose(expected, 1e-10, 1e-12));
      y.square().mean().backward();
      testing::expect_gradients(model, testing::gradients_of(alone), 1, 1e-10, 1e-12);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    , BlockOnRanks,
    ::testing::Values(
        BlockCase{.attention = {.hidden = kHidden, .heads = 6, .qkv_bias = true},
                  .folded = true,
                  .gated = true},
        BlockCase{.attention = {.hidden = kHidden,
                                .heads = 6,
                                .head_dim = 4,
                                .output_bias = true,
                                .qk_norm = true,
                                .window = 3},
                  .sequence_parallel = true},
        BlockCase{.attention = {.hidden = kHidden, .heads = 6, .qkv_bias = true, .fused_qkv = true},
                  .sequence_parallel = true},
        BlockCase{
            .attention =
                {.hidden = kHidden, .heads = 4, .kv_heads = 2, .qkv_bias = true, .fused_qkv = true},
            .folded = true,
            .sequence_parallel = true,
            .gated = true}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST_P(BlockOnRanks, DropsWhatOneRankDrops) {
  const auto run = [](Rank& rank, double dropout) {
    BlockCase c = GetParam();
    c.attention.dropout = dropout;
    OneBlock model(c);
    model.to(at::kDouble);
    testing::fill(model);
    const DeviceMesh mesh = rank.mesh({rank.size()}, {"tp"});
    parallelize_module(model, mesh, plan_of(c));
    const Placement place = c.sequence_parallel ? Placement(Shard{c.folded ? 0 : 1}) : Replicate{};
    manual_seed(3);
    const auto x = distribute_tensor(input_of(c), mesh, {place});
    return full_tensor(model(x));
  };
  at::Tensor expected;
  RunRanks(1, [&](Rank& rank) {
    expected = run(rank, 0.5);
    EXPECT_FALSE(expected.allclose(run(rank, 0), 1e-2, 1e-3));
  });
  RunRanks(2, [&](Rank& rank) { EXPECT_TRUE(run(rank, 0.5).allclose(expected, 1e-10, 1e-12)); });
}

TEST(BlockPlan, RefusesHeadsThatRanksDoNotDivide) {
  RunOnMesh({3}, {"tp"}, [](const DeviceMesh& mesh) {
    for (const bool fused : {false, true}) {
      const BlockCase c{
          .attention = {
              .hidden = kHidden, .heads = 4, .fused_qkv = fused, .names = {.output = "o"}}};
      OneBlock model(c);
      EXPECT_ERROR(parallelize_module(model, mesh, plan_of(c)), fused ? "4 groups" : "4 heads",
                   "3");
      EXPECT_FALSE(tessera::is_distributed(*model.norm->weight));
    }
    EXPECT_ERROR(attention_plan("attn", {.hidden = 12, .heads = 5}), "5 heads");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
