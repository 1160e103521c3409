// What may change between iterations.

#include <cmath>

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

TEST(Settings, SwitchesBetweenZero2AndZero3) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const auto gathers = [&] {
      const comm::TrafficTable before = rank.world()->traffic().table();
      local_loss(model, rank).backward();
      return traffic_of(rank.world()->traffic().since(before), "dp", "all_gather").calls;
    };
    EXPECT_EQ(gathers(), 7);
    set_reshard_after_forward(model, false);
    EXPECT_EQ(gathers(), 4);
    set_reshard_after_forward(*model.blocks[0], true);
    EXPECT_EQ(gathers(), 5);
  });
}

TEST(Settings, KeepsParametersBetweenMicroBatches) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  RunRanks(2, [&](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = false});
    set_reshard_after_backward(model, false);
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank, 0).backward();
    set_reshard_after_backward(model, true);
    local_loss(model, rank, 1).backward();
    EXPECT_EQ(traffic_of(rank.world()->traffic().since(before), "dp", "all_gather").calls, 4);
    expect_gradients(model, expected);
    EXPECT_TRUE(tessera::is_distributed(model.head->weight));
  });
}

class Accumulation : public ::testing::TestWithParam<int> {};

TEST_P(Accumulation, ReducesOnceForSeveralBackwards) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunSharded(GetParam(), [&](Rank& rank, ShardedModel& model) {
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_requires_gradient_sync(model, false);
    local_loss(model, rank, 0).backward();
    local_loss(model, rank, 1).backward();
    EXPECT_ERROR(model.head->slot("weight")->persistent().grad().sum(), "is not reduced");
    set_requires_gradient_sync(model, true);
    local_loss(model, rank, 2).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "dp", "reduce_scatter").calls, rank.size() > 1 ? 4 : 0);
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Accumulation, ::testing::Values(1, 2, 3));

TEST(Settings, AccumulatesInTheTypeOfTheReduction) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(1, 1, {.bias = false});
    fully_shard(linear, rank.mesh({2}, {"dp"}),
                {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    set_requires_gradient_sync(linear, false);
    linear(at::ones({1, 1})).sum().backward();
    set_requires_gradient_sync(linear, true);
    linear(at::ones({1, 1}).div(512)).sum().backward();  // lost beside 1 in bf16
    const at::Tensor gradient = full_tensor(linear.slot("weight")->persistent().grad());
    EXPECT_EQ(gradient.item<float>(), 1.0f + 1.0f / 512);
  });
}

class DivideFactor : public ::testing::TestWithParam<int> {};

TEST_P(DivideFactor, ReplacesTheNumberOfRanks) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunSharded(GetParam(), [&](Rank& rank, ShardedModel& model) {
    set_gradient_divide_factor(model, 0.5);
    local_loss(model, rank).backward();
    expect_gradients(model, expected, rank.size() / 0.5);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DivideFactor, ::testing::Values(1, 3));

/// The gradient of a weight of ones when four ranks' gradients in fp16 are all `value`.
at::Tensor gradient_in_half(Rank& rank, double value, const std::function<void(nn::Linear&)>& set) {
  Filled<nn::Linear> linear(3, 4, {.bias = false});
  fully_shard(linear, rank.mesh({rank.size()}, {"dp"}), {.mp_policy = {.reduce_dtype = at::kHalf}});
  set(linear);
  linear(at::ones({1, 3})).sum().mul(value).backward();
  return full_tensor(linear.slot("weight")->persistent().grad());
}

TEST(ForceSum, SumsBeforeAnyDivision) {
  RunRanks(4, [](Rank& rank) {
    const auto force = [](nn::Linear& linear) { set_force_sum_reduction(linear, true); };
    // 4 * 20000 is beyond fp16; 2^-24, its smallest number, does not survive a division by 2.
    EXPECT_TRUE(gradient_in_half(rank, 20000, force).isinf().all().item<bool>());
    EXPECT_TRUE(gradient_in_half(rank, 20000, [](auto&) {}).equal(at::ones({4, 3}).mul(20000)));
    const double least = std::ldexp(1.0, -24);
    EXPECT_TRUE(gradient_in_half(rank, least, force).equal(at::ones({4, 3}).mul(least)));
    EXPECT_TRUE(gradient_in_half(rank, least, [](auto&) {}).equal(at::zeros({4, 3})));
  });
}

// PyTorch divides by the factor before and after on one rank.
TEST(ForceSum, DividesOnceByTheFactor) {
  for (const int ranks : {1, 4}) {
    RunRanks(ranks, [](Rank& rank) {
      const at::Tensor gradient = gradient_in_half(rank, 2, [](nn::Linear& linear) {
        set_force_sum_reduction(linear, true);
        set_gradient_divide_factor(linear, 8);
      });
      EXPECT_TRUE(gradient.equal(at::ones({4, 3}).mul(rank.size() / 4.0)));
    });
  }
}

TEST(Settings, PrefetchesTheRequestedUnits) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 0});
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    set_forward_prefetch(model, {model.blocks[0].get(), model.blocks[1].get()});
    set_backward_prefetch(*model.blocks[2], {model.blocks[1].get(), model.blocks[0].get()});
    // A target that is not used until much later, and then freed unused.
    set_backward_prefetch(*model.blocks[0], {model.blocks[2].get()});
    local_loss(model, rank).backward();
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

TEST(Settings, GathersAheadAfterStartUnshard) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const comm::TrafficTable before = rank.world()->traffic().table();
    start_unshard(*model.blocks[0]);
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    EXPECT_EQ(traffic_of(rank.world()->traffic().since(before), "dp", "all_gather").calls, 4);
  });
}

TEST(Settings, RefusesSettingsOfAModuleWithoutUnits) {
  nn::Linear linear(2, 2);
  EXPECT_ERROR(set_reshard_after_forward(linear, true), "set_reshard_after_forward: this");
  EXPECT_ERROR(unshard(linear), "unshard: this");
}

}  // namespace
}  // namespace tessera::fsdp
