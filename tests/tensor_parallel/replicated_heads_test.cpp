// Grouped-query attention with fewer key-value heads than ranks, in fp64 against one rank.

#include <optional>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/memory/memory_scope.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

constexpr std::int64_t kWidth = 10, kHeadSize = 4;

struct Heads {
  std::int64_t queries, keys;
};

/// (tokens, kWidth) -> the same; keys are normed head by head.
class GroupedAttention : public nn::Module<GroupedAttention> {
 public:
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

/// The input is split along the tokens, as between the halves of a sequence-parallel block, or
/// whole.
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

struct HeadsCase {
  Heads heads;
  int ranks;
  bool split_tokens;
};

class ReplicatedHeads : public ::testing::TestWithParam<HeadsCase> {};

TEST_P(ReplicatedHeads, HaveTheResultsAndGradientsOfOneRank) {
  const HeadsCase& c = GetParam();
  const std::int64_t tokens = 7;
  const at::Tensor whole = testing::values({tokens, kWidth}, 0.4);
  const auto alone = make_attention(c.heads);
  const at::Tensor expected_x = whole.clone().requires_grad_();
  const at::Tensor expected = (*alone)(expected_x);
  expected.square().sum().backward();
  RunRanks(c.ranks, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({c.ranks}, {"tp"});
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

INSTANTIATE_TEST_SUITE_P(Sizes, ReplicatedHeads,
                         ::testing::Values(HeadsCase{{8, 2}, 4, true}, HeadsCase{{4, 2}, 4, false},
                                           HeadsCase{{6, 3}, 6, true}, HeadsCase{{6, 1}, 3, true},
                                           HeadsCase{{2, 2}, 2, false}));

// One of the input's 4 shards is kept for all products, so that backward gathers once.
TEST(ReplicatedHeadsOfASplitInput, KeepItsShard) {
  RunOnMesh({4}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const Heads heads{.queries = 8, .keys = 2};
    const auto kept_bytes = [&](bool regather) {
      const auto module = make_attention(heads);
      ParallelizePlan plan = plan_of(heads, true);
      plan.front().second = prepare_module_input({.input_layouts = {Shard{0}},
                                                  .desired_input_layouts = {Replicate{}},
                                                  .regather = regather});
      parallelize_module(*module, mesh, plan);
      const at::Tensor x = testing::values({2, kWidth}, rank.rank()).requires_grad_();
      (*module)(x);  // what is allocated once
      const testing::MemoryScope memory;
      const at::Tensor y = (*module)(x);
      return memory.bytes();
    };
    const std::int64_t shard = 8 * 2 * kWidth;
    // This shard is the caller's.
    EXPECT_EQ(kept_bytes(false) - kept_bytes(true), 4 * shard);
  });
}

TEST(ReplicatedHeadsUnderFsdp, HaveTheGradientsOfOneRank) {
  const Heads heads{.queries = 8, .keys = 2};
  const at::Tensor whole = testing::values({10, kWidth}, 0.4);
  const auto alone = make_attention(heads);
  // Two samples, of 5 tokens each.
  for (const at::Tensor& sample : whole.chunk(2)) {
    ((*alone)(sample).square().sum() / 2).backward();
  }
  RunOnMesh({2, 4}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    const auto module = make_attention(heads);
    parallelize_module(*module, mesh["tp"], plan_of(heads, false));
    // A unit within another one.
    fsdp::fully_shard(*module->k, mesh["dp"]);
    fsdp::fully_shard(*module, mesh["dp"]);
    const StrictScope strict;
    const auto sample = static_cast<std::size_t>(mesh["dp"].local_rank());
    (*module)(whole.chunk(2)[sample]).square().sum().backward();
    testing::expect_gradients(*module, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
  });
}

TEST(ReplicatedHeadsStyle, RefusesWhatItCannotShareOut) {
  RunOnMesh({4}, {"tp"}, [](const DeviceMesh& mesh) {
    nn::Linear linear(5, 12);
    const auto of = [](std::int64_t heads) {
      return ParallelizePlan{{"", replicated_heads_parallel({.heads = heads})}};
    };
    EXPECT_ERROR(parallelize_module(linear, mesh, of(3)),
                 "replicated_heads_parallel: 3 heads cannot be shared out to 4 ranks");
    EXPECT_ERROR(parallelize_module(linear, mesh, of(8)),
                 "the 12 output features of an nn::Linear are not 8 heads");
    EXPECT_ERROR(parallelize_module(linear, mesh, of(0)), "are not 0 heads");
    nn::Embedding embedding(4, 4);
    EXPECT_ERROR(parallelize_module(embedding, mesh, of(2)),
                 "replicated_heads_parallel is for nn::Linear");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
