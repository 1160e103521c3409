#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::tensor_parallel {
namespace {

using testing::Filled;
using testing::full_tensor;
using testing::SmallLlama;
using testing::SmallLlamaConfig;
using testing::uniform_values;

std::int64_t calls(const comm::TrafficTable& traffic, const std::string& collective) {
  const auto found = traffic.find({"tp", collective});
  return found == traffic.end() ? 0 : found->second.calls;
}

TEST(Colwise, SplitsTheColumnsOfALinear) {
  Filled<nn::Linear> alone(5, 7);
  const at::Tensor x = uniform_values({3, 5}, 0.5);
  RunRanks(4, [&](Rank& rank) {
    Filled<nn::Linear> linear(5, 7);
    parallelize_module(linear, rank.mesh({4}, {"tp"}), {{"", colwise_parallel()}});
    const std::vector<at::Tensor> parts = alone(x).detach().chunk(4, 1);
    EXPECT_TRUE(local_tensor(linear(x)).allclose(parts[static_cast<std::size_t>(rank.rank())]));
  });
}

TEST(Colwise, SumsTheGradientOfAReplicatedInput) {
  Filled<nn::Linear> alone(5, 7);
  const at::Tensor expected = uniform_values({3, 5}, 0.5).requires_grad_();
  alone(expected).square().sum().backward();
  RunRanks(3, [&](Rank& rank) {
    Filled<nn::Linear> linear(5, 7);
    parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", colwise_parallel()}});
    const at::Tensor x = uniform_values({3, 5}, 0.5).requires_grad_();
    const StrictScope strict;
    linear(x).square().sum().backward();
    EXPECT_TRUE(x.grad().allclose(expected.grad(), 1e-5, 1e-5));
    EXPECT_TRUE(full_tensor(linear.weight->grad()).allclose(alone.weight->grad(), 1e-5, 1e-5));
  });
}

TEST(Colwise, GathersItsOutputWhenAsked) {
  Filled<nn::Linear> alone(5, 7);
  const at::Tensor x = uniform_values({3, 5}, 0.5);
  RunRanks(2, [&](Rank& rank) {
    Filled<nn::Linear> linear(5, 7);
    parallelize_module(linear, rank.mesh({2}, {"tp"}),
                       {{"", colwise_parallel({.output_layouts = Replicate{}})}});
    EXPECT_TRUE(full_tensor(linear(x)).allclose(alone(x)));
  });
}

TEST(Rowwise, SplitsAPlainInputThatEveryRankHas) {
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

TEST(Rowwise, RefusesAPlainPartThatIsNotDeclared) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(6, 5);
    parallelize_module(linear, rank.mesh({2}, {"tp"}), {{"", rowwise_parallel()}});
    EXPECT_ERROR(linear(uniform_values({3, 3}, 0.5)),
                 "a Linear of 6 input features was given the "
                 "plain tensor [3, 3]",
                 "input_layouts = Shard{-1}");
  });
}

TEST(Rowwise, KnowsTheSizeOfAnUnevenPart) {
  Filled<nn::Linear> alone(7, 5);
  const at::Tensor x = uniform_values({3, 7}, 0.5);
  RunRanks(4, [&](Rank& rank) {
    Filled<nn::Linear> linear(7, 5);
    parallelize_module(linear, rank.mesh({4}, {"tp"}),
                       {{"", rowwise_parallel({.input_layouts = Shard{-1}})}});
    const at::Tensor part = x.chunk(4, 1)[static_cast<std::size_t>(rank.rank())];
    EXPECT_TRUE(full_tensor(linear(part)).allclose(alone(x), 1e-5, 1e-5));
  });
}

TEST(Rowwise, AddsTheBiasOnceAndUnchanged) {
  RunRanks(3, [](Rank& rank) {
    nn::Linear linear(6, 2);
    linear.weight->detach().zero_();
    linear.bias->detach().fill_(0.1);  // a third of it, three times, would not be it
    parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", rowwise_parallel()}});
    EXPECT_TRUE(full_tensor(linear(uniform_values({4, 6}, 1))).equal(at::full({4, 2}, 0.1f)));
  });
}

TEST(Rowwise, SplitsTheRowsOfAnEmbedding) {
  Filled<nn::Embedding> alone(10, 3);
  const at::Tensor ids = at::arange(8, at::kLong).mul(3).remainder(10);
  const at::Tensor out = alone(ids);
  out.square().sum().backward();
  RunRanks(4, [&](Rank& rank) {
    Filled<nn::Embedding> embedding(10, 3);
    parallelize_module(embedding, rank.mesh({4}, {"tp"}),
                       {{"", rowwise_parallel({.output_layouts = Shard{0}})}});
    const StrictScope strict;
    const at::Tensor part = embedding(ids);
    EXPECT_TRUE(
        local_tensor(part).equal(out.detach().chunk(4)[static_cast<std::size_t>(rank.rank())]));
    part.square().sum().backward();
    EXPECT_TRUE(full_tensor(embedding.weight->grad()).allclose(alone.weight->grad()));
  });
}

TEST(Rowwise, RefusesAnEmbeddingOfSplitIndices) {
  RunRanks(2, [](Rank& rank) {
    nn::Embedding embedding(10, 3);
    EXPECT_ERROR(parallelize_module(embedding, rank.mesh({2}, {"tp"}),
                                    {{"", rowwise_parallel({.input_layouts = Shard{0}})}}),
                 "rowwise_parallel of an Embedding takes the same indices on every rank");
  });
}

TEST(Sequence, NormsEachRanksTokens) {
  Filled<nn::RMSNorm> alone(4);
  const at::Tensor x = uniform_values({6, 4}, 0.1);
  alone(x).square().sum().backward();
  RunRanks(3, [&](Rank& rank) {
    Filled<nn::RMSNorm> norm(4);
    parallelize_module(norm, rank.mesh({3}, {"tp"}),
                       {{"", sequence_parallel({.sequence_dim = 0})}});
    const StrictScope strict;
    const at::Tensor part = norm(x);
    EXPECT_TRUE(
        local_tensor(part).allclose(alone(x).chunk(3)[static_cast<std::size_t>(rank.rank())]));
    part.square().sum().backward();
    EXPECT_EQ(DistributedTensor(norm.weight->grad()).placements(), Placements{Replicate{}});
    EXPECT_TRUE(full_tensor(norm.weight->grad()).allclose(alone.weight->grad(), 1e-5, 1e-5));
  });
}

TEST(PrepareInput, RefusesACallWithTooFewTensors) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(2, 2);
    parallelize_module(
        linear, rank.mesh({2}, {"tp"}),
        {{"", prepare_module_input({.input_layouts = {Replicate{}, Replicate{}},
                                    .desired_input_layouts = {Replicate{}, Replicate{}}})}});
    EXPECT_ERROR(linear(uniform_values({2, 2}, 0)),
                 "has placements for 2 tensors, but the call has 1");
  });
}

TEST(PrepareOutput, GathersTheRequestedOutput) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::RMSNorm> alone(4);
    Filled<nn::RMSNorm> norm(4);
    parallelize_module(norm, rank.mesh({2}, {"tp"}),
                       {{"", prepare_module_input({.input_layouts = {Shard{0}},
                                                   .desired_input_layouts = {Shard{0}}})},
                        {"", prepare_module_output({.output_layouts = {Shard{0}},
                                                    .desired_output_layouts = {Replicate{}}})}});
    const at::Tensor x = uniform_values({6, 4}, 0.1);
    const at::Tensor part = x.chunk(2)[static_cast<std::size_t>(rank.rank())];
    EXPECT_TRUE(full_tensor(norm(part)).allclose(alone(x)));
  });
}

TEST(Styles, RefuseATensorOfAnotherMesh) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    Filled<nn::Linear> linear(4, 4);
    parallelize_module(linear, mesh["tp"], {{"", colwise_parallel()}});
    const at::Tensor x = distribute_tensor(uniform_values({2, 4}, 0), mesh["dp"], {Replicate{}});
    EXPECT_ERROR(linear(x), "was given a tensor on DeviceMesh((dp=2), cpu)");
  });
}

struct Collectives {
  std::int64_t gathers, scatters, reduces;
  friend bool operator==(const Collectives&, const Collectives&) = default;
};

Collectives collectives(const comm::TrafficTable& traffic) {
  return {calls(traffic, "all_gather"), calls(traffic, "reduce_scatter"),
          calls(traffic, "all_reduce")};
}

TEST(Block, GathersTwiceAndScattersTwiceEachWay) {
  // 10 tokens on 4 ranks: uneven too.
  RunOnMesh({4}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    Filled<testing::LlamaBlock> block(testing::SmallLlamaConfig{});
    // Frozen norms: their gradients' reduction is no part of the block.
    block.first_norm->slot("weight")->get().set_requires_grad(false);
    block.second_norm->slot("weight")->get().set_requires_grad(false);
    ParallelizePlan plan;
    for (const auto& [pattern, style] : testing::plan_of_small_llama(true)) {
      if (pattern.starts_with("block*.")) {
        plan.emplace_back(pattern.substr(7), style);
      }
    }
    parallelize_module(block, mesh, plan);
    const at::Tensor x = distribute_tensor(uniform_values({10, 8}, 0.2), mesh, {Shard{0}})
                             .tensor()
                             .detach()
                             .requires_grad_();
    const StrictScope strict;

    const comm::TrafficTable start = rank.world()->traffic().table();
    const at::Tensor y = block(x);
    const comm::TrafficTable middle = rank.world()->traffic().table();
    EXPECT_EQ(collectives(rank.world()->traffic().since(start)), (Collectives{2, 2, 0}));
    DistributedTensor(y).to_local().square().sum().backward();
    // And gathers its halves' inputs again.
    EXPECT_EQ(collectives(rank.world()->traffic().since(middle)), (Collectives{4, 2, 0}));
  });
}

TEST(Block, SumsTheGradientsOfItsNormsAtOnce) {
  RunRanks(2, [](Rank& rank) {
    Filled<SmallLlama> model;
    parallelize_module(model, rank.mesh({2}, {"tp"}), testing::plan_of_small_llama(true));
    const at::Tensor ids = at::arange(11, at::kLong);
    for (int backward = 1; backward <= 2; ++backward) {
      const at::Tensor loss = cross_entropy(model(ids.slice(0, 0, 10)), ids.slice(0, 1, 11));
      const comm::TrafficTable before = rank.world()->traffic().table();
      const StrictScope strict;
      loss.backward();
      EXPECT_EQ(calls(rank.world()->traffic().since(before), "all_reduce"), 1);
    }
  });
}

class WholeModel : public ::testing::TestWithParam<std::pair<int, bool>> {};

TEST_P(WholeModel, HasTheGradientsOfOneRank) {
  const auto& [ranks, sequence_parallel] = GetParam();
  const SmallLlamaConfig config{.bias = true};
  const at::Tensor ids = at::arange(11, at::kLong).mul(5).remainder(13);
  Filled<SmallLlama> alone(config);
  alone.to(at::kDouble);
  const at::Tensor expected = cross_entropy(alone(ids.slice(0, 0, 10)), ids.slice(0, 1, 11));
  expected.backward();
  RunRanks(ranks, [&, split = sequence_parallel](Rank& rank) {
    Filled<SmallLlama> model(config);
    model.to(at::kDouble);
    parallelize_module(model, rank.mesh({rank.size()}, {"tp"}),
                       testing::plan_of_small_llama(split));
    const StrictScope strict;
    const at::Tensor loss = cross_entropy(model(ids.slice(0, 0, 10)), ids.slice(0, 1, 11));
    loss.backward();
    EXPECT_TRUE(loss.allclose(expected, 1e-10, 1e-10));
    testing::expect_gradients(model, testing::gradients_of(alone), 1, 1e-10, 1e-10);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_EQ(sharding_spec(slot->get().grad()), sharding_spec(slot->get())) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WholeModel,
                         ::testing::Values(std::pair{2, true}, std::pair{3, true},
                                           std::pair{4, true}, std::pair{2, false},
                                           std::pair{3, false}, std::pair{4, false}));

}  // namespace
}  // namespace tessera::tensor_parallel
