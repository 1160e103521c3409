#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/ranks.h"
#include "testing/small_llama.h"

namespace tessera::tensor_parallel {
namespace {

using testing::SmallLlama;
using testing::SmallLlamaConfig;

at::Tensor some(at::IntArrayRef sizes, double seed) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble)
      .mul(1.3)
      .add(seed)
      .sin()
      .to(at::kFloat)
      .view(sizes);
}

void fill(nn::ModuleBase& module) {
  double seed = 0;
  for (const auto& [name, slot] : module.named_slots()) {
    slot->get().detach().copy_(some(slot->get().sizes(), seed++));
  }
}

at::Tensor whole(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor()
                                         : tensor.detach();
}

std::int64_t calls(const comm::TrafficTable& traffic, const std::string& collective) {
  const auto found = traffic.find({"tp", collective});
  return found == traffic.end() ? 0 : found->second.calls;
}

TEST(Colwise, SplitsTheColumnsOfALinear) {
  nn::Linear alone(5, 7);
  fill(alone);
  const at::Tensor x = some({3, 5}, 0.5);
  RunRanks(4, [&](Rank& rank) {
    nn::Linear linear(5, 7);
    fill(linear);
    parallelize_module(linear, rank.mesh({4}, {"tp"}), {{"", colwise_parallel()}});
    const std::vector<at::Tensor> parts = alone(x).detach().chunk(4, 1);
    EXPECT_TRUE(linear(x).allclose(parts[static_cast<std::size_t>(rank.rank())]));
  });
}

TEST(Colwise, SumsTheGradientOfAReplicatedInput) {
  nn::Linear alone(5, 7);
  fill(alone);
  const at::Tensor expected = some({3, 5}, 0.5).requires_grad_();
  alone(expected).square().sum().backward();
  RunRanks(3, [&](Rank& rank) {
    nn::Linear linear(5, 7);
    fill(linear);
    parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", colwise_parallel()}});
    const at::Tensor x = some({3, 5}, 0.5).requires_grad_();
    const StrictScope strict;
    linear(x).square().sum().backward();
    EXPECT_TRUE(x.grad().allclose(expected.grad(), 1e-5, 1e-5));
    EXPECT_TRUE(whole(linear.weight->grad()).allclose(alone.weight->grad(), 1e-5, 1e-5));
  });
}

TEST(Colwise, GathersItsOutputWhenAsked) {
  nn::Linear alone(5, 7);
  fill(alone);
  const at::Tensor x = some({3, 5}, 0.5);
  RunRanks(2, [&](Rank& rank) {
    nn::Linear linear(5, 7);
    fill(linear);
    parallelize_module(linear, rank.mesh({2}, {"tp"}),
                       {{"", colwise_parallel({.output = Replicate{}})}});
    EXPECT_TRUE(linear(x).allclose(alone(x)));
  });
}

TEST(Rowwise, KnowsTheSizeOfAnUnevenInput) {
  nn::Linear alone(7, 5);
  fill(alone);
  const at::Tensor x = some({3, 7}, 0.5);
  RunRanks(4, [&](Rank& rank) {
    nn::Linear linear(7, 5);
    fill(linear);
    parallelize_module(linear, rank.mesh({4}, {"tp"}), {{"", rowwise_parallel()}});
    const at::Tensor part = x.chunk(4, 1)[static_cast<std::size_t>(rank.rank())];
    EXPECT_TRUE(linear(part).allclose(alone(x), 1e-5, 1e-5));
  });
}

TEST(Rowwise, AddsTheBiasOnceAndUnchanged) {
  RunRanks(3, [](Rank& rank) {
    nn::Linear linear(6, 2);
    linear.weight->detach().zero_();
    linear.bias->detach().fill_(0.1);  // a third of it, three times, would not be it
    parallelize_module(linear, rank.mesh({3}, {"tp"}), {{"", rowwise_parallel()}});
    EXPECT_TRUE(linear(some({4, 2}, 1)).equal(at::full({4, 2}, 0.1f)));
  });
}

TEST(Rowwise, SplitsTheRowsOfAnEmbedding) {
  nn::Embedding alone(10, 3);
  fill(alone);
  const at::Tensor ids = at::arange(8, at::kLong).mul(3).remainder(10);
  const at::Tensor out = alone(ids);
  out.square().sum().backward();
  RunRanks(4, [&](Rank& rank) {
    nn::Embedding embedding(10, 3);
    fill(embedding);
    parallelize_module(embedding, rank.mesh({4}, {"tp"}),
                       {{"", rowwise_parallel({.input = Replicate{}, .output = Shard{0}})}});
    const StrictScope strict;
    const at::Tensor part = embedding(ids);
    EXPECT_TRUE(part.equal(out.detach().chunk(4)[static_cast<std::size_t>(rank.rank())]));
    part.square().sum().backward();
    EXPECT_TRUE(whole(embedding.weight->grad()).allclose(alone.weight->grad()));
  });
}

TEST(Rowwise, RefusesAnEmbeddingOfSplitIndices) {
  RunRanks(2, [](Rank& rank) {
    nn::Embedding embedding(10, 3);
    EXPECT_THROW(parallelize_module(embedding, rank.mesh({2}, {"tp"}), {{"", rowwise_parallel()}}),
                 Error);
  });
}

TEST(Sequence, NormsEachRanksTokens) {
  nn::RMSNorm alone(4);
  fill(alone);
  const at::Tensor x = some({6, 4}, 0.1);
  alone(x).square().sum().backward();
  RunRanks(3, [&](Rank& rank) {
    nn::RMSNorm norm(4);
    fill(norm);
    parallelize_module(norm, rank.mesh({3}, {"tp"}),
                       {{"", sequence_parallel({.sequence_dim = 0, .use_local_output = true})}});
    const StrictScope strict;
    const at::Tensor part = norm(x.chunk(3)[static_cast<std::size_t>(rank.rank())]);
    EXPECT_TRUE(part.allclose(alone(x).chunk(3)[static_cast<std::size_t>(rank.rank())]));
    part.square().sum().backward();
    EXPECT_EQ(DistributedTensor(norm.weight->grad()).placements(), Placements{Replicate{}});
    EXPECT_TRUE(whole(norm.weight->grad()).allclose(alone.weight->grad(), 1e-5, 1e-5));
  });
}

TEST(PrepareInput, RefusesACallWithTooFewTensors) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(2, 2);
    parallelize_module(linear, rank.mesh({2}, {"tp"}),
                       {{"", prepare_module_input({.input = {Replicate{}, Replicate{}},
                                                   .desired_input = {Replicate{}, Replicate{}}})}});
    EXPECT_THROW(linear(some({2, 2}, 0)), Error);
  });
}

TEST(PrepareOutput, GathersWhatItIsTold) {
  RunRanks(2, [](Rank& rank) {
    nn::RMSNorm norm(4);
    fill(norm);
    parallelize_module(
        norm, rank.mesh({2}, {"tp"}),
        {{"", prepare_module_output({.output = {Shard{0}}, .desired_output = {Replicate{}}})}});
    const at::Tensor x = some({6, 4}, 0.1);
    EXPECT_TRUE(norm(x.chunk(2)[static_cast<std::size_t>(rank.rank())]).allclose(norm.forward(x)));
  });
}

TEST(Styles, RefuseATensorOfAnotherMesh) {
  RunRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"dp", "tp"});
    nn::Linear linear(4, 4);
    parallelize_module(linear, mesh["tp"], {{"", colwise_parallel()}});
    const at::Tensor x = distribute_tensor(some({2, 4}, 0), mesh["dp"], {Replicate{}});
    EXPECT_THROW(linear(x), Error);
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
  RunRanks(4, [](Rank& rank) {
    testing::LlamaBlock block({});
    fill(block);
    // Frozen norms: their gradients' reduction is no part of the block.
    block.first_norm->slot("weight")->get().set_requires_grad(false);
    block.second_norm->slot("weight")->get().set_requires_grad(false);
    const DeviceMesh mesh = rank.mesh({4}, {"tp"});
    Plan plan;
    for (const auto& [pattern, style] : testing::plan_of_small_llama(true)) {
      if (pattern.starts_with("block*.")) plan.emplace_back(pattern.substr(7), style);
    }
    parallelize_module(block, mesh, plan);
    const at::Tensor x =
        distribute_tensor(some({10, 8}, 0.2), mesh, {Shard{0}}).tensor().detach().requires_grad_();
    const StrictScope strict;

    const comm::TrafficTable start = rank.world()->traffic().table();
    const at::Tensor y = block(x);
    const comm::TrafficTable middle = rank.world()->traffic().table();
    EXPECT_EQ(collectives(rank.world()->traffic().since(start)), (Collectives{2, 2, 0}));
    DistributedTensor(y).to_local().square().sum().backward();
    EXPECT_EQ(collectives(rank.world()->traffic().since(middle)), (Collectives{2, 2, 0}));
  });
}

TEST(Block, SumsTheGradientsOfItsNormsAtOnce) {
  RunRanks(2, [](Rank& rank) {
    SmallLlama model;
    fill(model);
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
  SmallLlama alone(config);
  fill(alone);
  const at::Tensor expected = cross_entropy(alone(ids.slice(0, 0, 10)), ids.slice(0, 1, 11));
  expected.backward();
  RunRanks(ranks, [&, split = sequence_parallel](Rank& rank) {
    SmallLlama model(config);
    fill(model);
    parallelize_module(model, rank.mesh({rank.size()}, {"tp"}),
                       testing::plan_of_small_llama(split));
    const StrictScope strict;
    const at::Tensor loss = cross_entropy(model(ids.slice(0, 0, 10)), ids.slice(0, 1, 11));
    loss.backward();
    EXPECT_TRUE(loss.allclose(expected, 1e-5, 1e-5));
    const auto reference = alone.named_slots();
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_EQ(sharding_spec(slot->get().grad()), sharding_spec(slot->get())) << name;
      EXPECT_TRUE(
          whole(slot->get().grad()).allclose(reference[i++].second->get().grad(), 1e-3, 1e-5))
          << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WholeModel,
                         ::testing::Values(std::pair{2, true}, std::pair{3, true},
                                           std::pair{4, true}, std::pair{2, false},
                                           std::pair{4, false}));

}  // namespace
}  // namespace tessera::tensor_parallel
