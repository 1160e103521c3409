// libtorch's post-accumulate-grad hooks of sharded parameters: an optimizer that steps in backward.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/optim/adamw.h"
#include "training.h"

namespace tessera::fsdp {
namespace {

using testing::Arrangement;
using testing::local_loss;
using testing::shard;
using testing::SmallModel;

/// Updates one parameter as soon as its gradient is there, and drops the gradient.
struct StepInBackward final : torch::autograd::PostAccumulateGradHook {
  StepInBackward(optim::Sgd& sgd, int& count) : optimizer(sgd), calls(count) {}

  void operator()(const at::Tensor& parameter) override {
    EXPECT_TRUE(tessera::is_distributed(parameter));
    EXPECT_TRUE(parameter.grad().defined());
    optimizer.step();
    optimizer.zero_grad();
    ++calls;
  }

  optim::Sgd& optimizer;
  int& calls;
};

/// An optimizer for each parameter, which steps in backward.
std::vector<std::unique_ptr<optim::Sgd>> step_in_backward(SmallModel& model, int& calls) {
  std::vector<std::unique_ptr<optim::Sgd>> optimizers;
  for (const auto& [name, slot] : model.named_slots()) {
    optimizers.push_back(
        std::make_unique<optim::Sgd>(std::vector{slot}, optim::SgdOptions{.lr = 0.1}));
    torch::autograd::impl::set_post_acc_grad_hooks(
        slot->persistent(), std::make_unique<StepInBackward>(*optimizers.back(), calls));
  }
  return optimizers;
}

class OptimizerInBackward : public ::testing::TestWithParam<Arrangement> {};

TEST_P(OptimizerInBackward, StepsAsOneAfterBackwardDoes) {
  const Arrangement& split = GetParam();
  const testing::Training expected = testing::train_alone({}, 3);
  const auto ranks = static_cast<int>(c10::multiply_integers(split.sizes));
  RunRanks(ranks, [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options);
    int calls = 0;
    const auto optimizers = step_in_backward(model, calls);
    for (int step = 0; step < 3; ++step) {
      local_loss(model, rank, step).backward();
    }
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      const at::Tensor difference =
          testing::full_tensor(slot->persistent()).sub(expected.parameters[i++]);
      EXPECT_LT(difference.abs().max().item<double>(), 1e-6) << name;
      EXPECT_FALSE(slot->persistent().grad().defined()) << name;
    }
    EXPECT_EQ(calls, 3 * static_cast<int>(expected.parameters.size()));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, OptimizerInBackward,
    ::testing::Values(Arrangement{"one rank", {1}, {"dp"}}, Arrangement{"ZeRO-3", {3}, {"dp"}},
                      Arrangement{"ZeRO-2", {2}, {"dp"}, {.reshard_after_forward = false}},
                      Arrangement{"HSDP", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"offloaded", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return "Arrangement" + std::to_string(info.index); });

TEST(PostAccumulateHook, IsCalledForReducedGradientsOnly) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    int calls = 0;
    const auto optimizers = step_in_backward(model, calls);
    set_requires_gradient_sync(model, false);
    local_loss(model, rank, 0).backward();
    EXPECT_EQ(calls, 0);
    set_requires_gradient_sync(model, true);
    local_loss(model, rank, 1).backward();
    EXPECT_EQ(calls, static_cast<int>(model.named_slots().size()));
  });
}

}  // namespace
}  // namespace tessera::fsdp
