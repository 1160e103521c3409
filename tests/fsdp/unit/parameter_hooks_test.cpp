// libtorch's register_hook of parameters, before and after they are sharded.

#include "fsdp/training/training.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::fsdp {
namespace {

using testing::Arrangement;

/// Doubles every gradient, and counts.
void double_gradients(const nn::ModuleBase& model, int& calls) {
  for (const auto& [name, slot] : model.named_slots()) {
    slot->persistent().register_hook([&calls](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
  }
}

std::vector<at::Tensor> doubled(std::vector<at::Tensor> gradients) {
  for (at::Tensor& gradient : gradients) {
    gradient = gradient * 2;
  }
  return gradients;
}

class ParameterHooks : public ::testing::TestWithParam<Arrangement> {};

TEST_P(ParameterHooks, FromBeforeShardingChangeTheReducedGradient) {
  const Arrangement& split = GetParam();
  const std::vector<at::Tensor> expected = doubled(gradients_alone());
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    int calls = 0;
    double_gradients(model, calls);
    shard(model, rank.mesh(split.sizes, split.names), split.options);
    local_loss(model, rank).backward();
    EXPECT_EQ(calls, std::ssize(expected));
    expect_gradients(model, expected);
  });
}

TEST_P(ParameterHooks, FromAfterShardingChangeTheReducedGradient) {
  const Arrangement& split = GetParam();
  const std::vector<at::Tensor> expected = doubled(gradients_alone({}, {0, 1}));
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options);
    int calls = 0;
    double_gradients(model, calls);
    local_loss(model, rank, 0).backward();
    local_loss(model, rank, 1).backward();
    EXPECT_EQ(calls, 2 * std::ssize(expected));
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, ParameterHooks,
    ::testing::Values(Arrangement{"one rank", {1}, {"dp"}}, Arrangement{"ZeRO-3", {3}, {"dp"}},
                      Arrangement{"uneven", {4}, {"dp"}},
                      Arrangement{"HSDP", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"offloaded", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return "Arrangement" + std::to_string(info.index); });

TEST(ParameterHook, IsNotCalledOnceRemovedBeforeSharding) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    const at::Tensor before = *model.head->weight;
    const auto hook = before.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    shard(model, rank.mesh({2}, {"dp"}));
    before.remove_hook(hook);
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

TEST(ParameterHook, IsCalledForAParameterThatAPlanDistributes) {
  Filled<nn::Linear> alone(4, 6);
  const at::Tensor x = testing::uniform_values({3, 4}, 1);
  alone(x).square().sum().backward();
  RunRanks(2, [&](Rank& rank) {
    Filled<nn::Linear> linear(4, 6);
    int calls = 0;
    double_gradients(linear, calls);
    tensor_parallel::parallelize_module(linear, rank.mesh({2}, {"tp"}),
                                        {{"", tensor_parallel::colwise_parallel()}});
    DistributedTensor(linear(x).square().sum()).full_tensor().backward();
    EXPECT_EQ(calls, 2);
    EXPECT_TRUE(full_tensor(linear.slot("weight")->persistent().grad())
                    .allclose(alone.weight->grad() * 2, 1e-4, 1e-5));
  });
}

TEST(ParameterHook, IsRefusedIfItReturnsAnotherLayout) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    model.head->slot("weight")->persistent().register_hook(
        [](const at::Tensor& gradient) { return DistributedTensor(gradient).full_tensor(); });
    EXPECT_ERROR(local_loss(model, rank).backward(), "a hook", "'head.weight'", "a plain tensor");
  });
}

TEST(Gradients, AreRefusedInBackwardIfTheirLayoutIsNotTheParameters) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    const at::Tensor& weight = model.head->slot("weight")->persistent();
    weight.mutable_grad() = DistributedTensor(weight.detach()).redistribute({Replicate{}}).tensor();
    EXPECT_ERROR(local_loss(model, rank).backward(), "the gradient", "'head.weight'",
                 "redistribute it");
  });
}

TEST(SetData, RefusesAnotherLayoutForAShard) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    at::Tensor weight = model.head->slot("weight")->persistent();
    const at::Tensor whole =
        DistributedTensor(weight.detach()).redistribute({Replicate{}}).tensor();
    EXPECT_ERROR(weight.set_data(whole), "set_data", "'head.weight'", "copy_");
    weight.requires_grad_(false);
    weight.set_data(whole);
    EXPECT_ERROR(local_loss(model, rank), "'head.weight'", "not laid out as its shard was");
  });
}

}  // namespace
}  // namespace tessera::fsdp
