// What fully_shard can be told, each held against one rank that trains with the whole batch.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "fsdp/small_model.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera::fsdp {
namespace {

using testing::SmallModel;
using testing::whole;

constexpr std::int64_t kRows = 12;
constexpr std::int64_t kDim = 7, kHidden = 10, kClasses = 3;

at::Tensor batch(int step) {
  return testing::wave({kRows, kDim}, 100 + step);
}

at::Tensor local_loss(SmallModel& model, const Rank& rank, int step = 0) {
  const std::int64_t rows = kRows / rank.size();
  return testing::loss_of(model, batch(step), rank.rank() * rows, rows);
}

void shard(SmallModel& model, const DeviceMesh& mesh, const Options& options = {}) {
  for (const auto& block : model.blocks) fully_shard(*block, mesh, options);
  Options root = options;
  root.neighbours = 1;
  fully_shard(model, mesh, root);
}

std::vector<at::Tensor> gradients_alone(const std::vector<int>& steps = {0}) {
  SmallModel alone(kDim, kHidden, kClasses);
  testing::fill(alone);
  for (const int step : steps) testing::loss_of(alone, batch(step), 0, kRows).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : alone.named_slots()) gradients.push_back(slot->get().grad());
  return gradients;
}

void expect_gradients(SmallModel& model, const std::vector<at::Tensor>& expected,
                      double factor = 1) {
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor gradient = whole(slot->persistent().grad());
    EXPECT_TRUE(gradient.allclose(expected[i++].mul(factor), 1e-4, 1e-6)) << name;
  }
}

comm::Traffic of(const comm::TrafficTable& traffic, const std::string& group,
                 const std::string& kind) {
  const auto found = traffic.find({group, kind});
  return found == traffic.end() ? comm::Traffic{} : found->second;
}

class Hybrid : public ::testing::TestWithParam<std::pair<std::int64_t, std::int64_t>> {};

TEST_P(Hybrid, AveragesOverReplicasToo) {
  const auto [replicas, shards] = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(static_cast<int>(replicas * shards), [&, r = replicas, s = shards](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({r, s}, {"replicate", "shard"}));
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(of(traffic, "replicate", "all_reduce").calls, r > 1 ? 4 : 0);
    EXPECT_EQ(of(traffic, "shard", "reduce_scatter").calls, s > 1 ? 4 : 0);
    expect_gradients(model, expected);
    const Placements lie = DistributedTensor(model.head->slot("weight")->persistent()).placements();
    EXPECT_EQ(lie, (Placements{Replicate{}, Shard{0}}));
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Hybrid,
                         ::testing::Values(std::pair{2, 2}, std::pair{3, 1}, std::pair{1, 3},
                                           std::pair{2, 3}));

TEST(Options, ShardsTheDimensionThatItIsTold) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(4, [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({4}, {"dp"}),
          {.shard_placement = [](const std::string& name,
                                 const at::Tensor&) -> std::optional<Placement> {
            if (name.ends_with("up.weight")) return Shard{1};
            if (name.ends_with("down.weight")) return Shard{-1};
            if (name.ends_with("down.bias")) return Replicate{};
            return std::nullopt;
          }});
    const auto lies = [](const nn::Linear& linear, const std::string& name) {
      return DistributedTensor(linear.slot(name)->persistent()).placements();
    };
    EXPECT_EQ(lies(*model.blocks[0]->up, "weight"), Placements{Shard{1}});
    EXPECT_EQ(lies(*model.blocks[0]->down, "weight"), Placements{Shard{1}});
    EXPECT_EQ(lies(*model.blocks[0]->down, "bias"), Placements{Replicate{}});
    EXPECT_EQ(lies(*model.blocks[0]->up, "bias"), Placements{Shard{0}});
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

TEST(Options, RefusesADimensionThatAParameterLacks) {
  RunRanks(1, [](Rank& rank) {
    nn::Linear linear(2, 2);
    const Options options{.shard_placement = [](const std::string&, const at::Tensor&) {
      return std::optional<Placement>(Shard{1});
    }};
    EXPECT_THROW(fully_shard(linear, rank.mesh({1}, {"dp"}), options), Error);
    EXPECT_FALSE(tessera::is_distributed(linear.weight));
  });
}

/// x * scale, whose parameter has no dimensions.
class Scale : public nn::Module<Scale> {
 public:
  Scale() { scale = register_slot("scale", at::ones({}).mul(3)); }
  at::Tensor forward(const at::Tensor& x) { return x.mul(*scale); }
  nn::Parameter scale;
};

TEST(Options, ReplicatesScalars) {
  RunRanks(3, [](Rank& rank) {
    Scale module;
    fully_shard(module, rank.mesh({3}, {"dp"}));
    module(at::ones({2}).mul(rank.rank())).sum().backward();
    EXPECT_EQ(whole(module.slot("scale")->persistent()).item<float>(), 3);
    EXPECT_EQ(whole(module.slot("scale")->persistent().grad()).item<float>(), (0 + 2 + 4) / 3.0f);
  });
}

TEST(Options, LeavesIgnoredParametersAlone) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 4);
    testing::fill(linear);
    fully_shard(linear, rank.mesh({2}, {"dp"}), {.ignored = {linear.slot("bias")}});
    EXPECT_FALSE(tessera::is_distributed(linear.bias));
    linear(at::ones({1, 3}).mul(rank.rank())).sum().backward();
    EXPECT_TRUE(linear.bias->grad().equal(at::ones({4})));
    EXPECT_TRUE(tessera::is_distributed(linear.slot("weight")->persistent().grad()));
  });
}

/// A layer in fp64 beside others in fp32.
TEST(Options, TakesParametersOfSeveralTypesInOneUnit) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 4);
    testing::fill(linear);
    linear.slot("bias")->set(linear.bias->detach().to(at::kDouble).requires_grad_());
    const at::Tensor bias = linear.bias->detach().clone();
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    unshard(linear);
    EXPECT_EQ(linear.bias->scalar_type(), at::kDouble);
    EXPECT_TRUE(linear.bias->detach().equal(bias));
  });
}

TEST(Options, SwitchesBetweenZero2AndZero3) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const auto gathers = [&] {
      const comm::TrafficTable before = rank.world()->traffic().table();
      local_loss(model, rank).backward();
      return of(rank.world()->traffic().since(before), "dp", "all_gather").calls;
    };
    EXPECT_EQ(gathers(), 7);
    set_reshard_after_forward(model, false);
    EXPECT_EQ(gathers(), 4);
    set_reshard_after_forward(*model.blocks[0], true);
    EXPECT_EQ(gathers(), 5);
  });
}

TEST(Options, KeepsParametersBetweenMicroBatches) {
  const std::vector<at::Tensor> expected = gradients_alone({0, 1});
  RunRanks(2, [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}), {.reshard_after_forward = false});
    set_reshard_after_backward(model, false);
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank, 0).backward();
    set_reshard_after_backward(model, true);
    local_loss(model, rank, 1).backward();
    EXPECT_EQ(of(rank.world()->traffic().since(before), "dp", "all_gather").calls, 4);
    expect_gradients(model, expected);
    EXPECT_TRUE(tessera::is_distributed(model.head->weight));
  });
}

class Accumulation : public ::testing::TestWithParam<int> {};

TEST_P(Accumulation, ReducesOnceForSeveralBackwards) {
  const std::vector<at::Tensor> expected = gradients_alone({0, 1, 2});
  RunRanks(GetParam(), [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({rank.size()}, {"dp"}));
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_requires_gradient_sync(model, false);
    local_loss(model, rank, 0).backward();
    local_loss(model, rank, 1).backward();
    EXPECT_FALSE(model.head->slot("weight")->persistent().grad().defined());
    set_requires_gradient_sync(model, true);
    local_loss(model, rank, 2).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(of(traffic, "dp", "reduce_scatter").calls, rank.size() > 1 ? 4 : 0);
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Accumulation, ::testing::Values(1, 2, 3));

TEST(Options, AccumulatesInTheTypeOfTheReduction) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(1, 1, {.bias = false});
    testing::fill(linear);
    fully_shard(linear, rank.mesh({2}, {"dp"}),
                {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    set_requires_gradient_sync(linear, false);
    linear(at::ones({1, 1})).sum().backward();
    set_requires_gradient_sync(linear, true);
    linear(at::ones({1, 1}).div(512)).sum().backward();  // lost beside 1 in bf16
    const at::Tensor gradient = whole(linear.slot("weight")->persistent().grad());
    EXPECT_EQ(gradient.item<float>(), 1.0f + 1.0f / 512);
  });
}

class DivideFactor : public ::testing::TestWithParam<int> {};

TEST_P(DivideFactor, ReplacesTheNumberOfRanks) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(GetParam(), [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({rank.size()}, {"dp"}));
    set_gradient_divide_factor(model, 0.5);
    local_loss(model, rank).backward();
    expect_gradients(model, expected, rank.size() / 0.5);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DivideFactor, ::testing::Values(1, 3));

TEST(Options, GathersForBackwardAmongNeighbours) {
  const std::vector<at::Tensor> expected = gradients_alone({0, 1});
  RunRanks(4, [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({4}, {"dp"}), {.neighbours = 2});
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank, 0).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(of(traffic, "dp", "all_gather").calls, 4);
    EXPECT_EQ(of(traffic, "dp/2", "all_gather").calls, 3);
    local_loss(model, rank, 1).backward();
    expect_gradients(model, expected);
  });
}

TEST(Options, RefusesNeighboursThatDoNotDivideTheRanks) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(2, 2);
    EXPECT_THROW(fully_shard(linear, rank.mesh({4}, {"dp"}), {.neighbours = 3}), Error);
  });
}

TEST(Options, MakesSeveralModulesOneUnit) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    fully_shard(*model.blocks[0], mesh);
    fully_shard({model.blocks[1].get(), model.blocks[2].get()}, mesh);
    fully_shard(model, mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(of(traffic, "dp", "all_gather").calls, 2 * 2 + 1);
    EXPECT_EQ(of(traffic, "dp", "reduce_scatter").calls, 3);
    expect_gradients(model, expected);
  });
}

TEST(Options, PrefetchesWhatItIsTold) {
  const std::vector<at::Tensor> expected = gradients_alone({0, 0});
  RunRanks(2, [&](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    set_forward_prefetch(model, {model.blocks[0].get(), model.blocks[1].get()});
    set_backward_prefetch(*model.blocks[2], {model.blocks[1].get(), model.blocks[0].get()});
    // A target that is not used until much later, and then freed unused.
    set_backward_prefetch(*model.blocks[0], {model.blocks[2].get()});
    local_loss(model, rank).backward();
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

TEST(Options, GathersAheadWhenAskedByHand) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const comm::TrafficTable before = rank.world()->traffic().table();
    start_unshard(*model.blocks[0]);
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    EXPECT_EQ(of(rank.world()->traffic().since(before), "dp", "all_gather").calls, 4);
  });
}

TEST(Options, RefusesSettingsOfAModuleWithoutUnits) {
  nn::Linear linear(2, 2);
  EXPECT_THROW(set_reshard_after_forward(linear, true), Error);
  EXPECT_THROW(unshard(linear), Error);
}

}  // namespace
}  // namespace tessera::fsdp
