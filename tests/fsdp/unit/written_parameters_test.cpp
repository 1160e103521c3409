// Parameters that are written where their old values, or copies of them, are in use: between a
// forward and its backward, which autograd refuses on one rank where it needs them; while they are
// gathered; and in forward.

#include <c10/util/Exception.h>

#include "fsdp/training/training.h"
#include "tessera/nn/child.h"
#include "tessera/optim/adamw.h"

namespace tessera::fsdp {
namespace {

using testing::Arrangement;

/// No rank has an empty shard: a write to one is not seen.
constexpr testing::Sizes kSizes{.classes = 7};
constexpr auto kModified = "modified by an inplace operation";

class WrittenParameters : public ::testing::TestWithParam<Arrangement> {};

TEST_P(WrittenParameters, AreRefusedInBackward) {
  const Arrangement& split = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
    optim::Sgd optimizer(model, {.lr = 1.0});
    const at::Tensor x = testing::batch(kDim, 0).requires_grad_();
    const at::Tensor first = model(x).square().mean();
    model(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_THROWN(std::exception, first.backward(), kModified);
  });
}

TEST_P(WrittenParameters, AreRefusedInBackwardIfWrittenThroughTheirTensor) {
  const Arrangement& split = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
    const at::Tensor loss = local_loss(model, rank);
    {
      const c10::AutoGradMode no_grad(false);
      model.blocks[1]->up->slot("weight")->persistent().mul_(2);
    }
    EXPECT_THROWN(std::exception, loss.backward(), kModified);
  });
}

TEST_P(WrittenParameters, AreAcceptedIfBackwardNeedsNoValue) {
  const Arrangement& split = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone(kSizes);
  RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
    const at::Tensor loss = local_loss(model, rank);
    {
      const c10::AutoGradMode no_grad(false);
      model.blocks[1]->up->slot("bias")->persistent().mul_(2);
    }
    loss.backward();
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, WrittenParameters,
    ::testing::Values(Arrangement{"one rank", {1}, {"dp"}}, Arrangement{"ZeRO-3", {3}, {"dp"}},
                      Arrangement{"ZeRO-2", {2}, {"dp"}, {.reshard_after_forward = false}},
                      Arrangement{"hpZ", {4}, {"dp"}, {.post_forward_mesh_size = 2}},
                      Arrangement{"HSDP", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"offloaded", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return "Arrangement" + std::to_string(info.index); });

/// Halves every shard in place.
void halve(nn::ModuleBase& model) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : model.named_slots()) {
    local_tensor(slot->persistent()).mul_(0.5);
  }
}

/// What the model of halved parameters gives.
at::Tensor halved_result(const at::Tensor& x) {
  testing::SmallModel alone(kDim, testing::kHidden, kSizes.classes);
  testing::fill(alone);
  halve(alone);
  return alone(x);
}

class WrittenWhileGathered : public ::testing::TestWithParam<Arrangement> {
 protected:
  using Body = std::function<void(testing::ShardedModel& model, const at::Tensor& x)>;

  /// Runs `body`, after which a forward of the model must see that all parameters were halved.
  static void expect_seen(const Body& body) {
    const Arrangement& split = GetParam();
    const at::Tensor x = testing::batch(kDim, 0);
    const at::Tensor expected = halved_result(x);
    RunRanks(static_cast<int>(c10::multiply_integers(split.sizes)), [&](Rank& rank) {
      testing::ShardedModel model(rank.mesh(split.sizes, split.names), split.options, kSizes);
      body(model, x);
      EXPECT_TRUE(model(x).to(at::kFloat).allclose(expected, 2e-2, 2e-2));
    });
  }
};

TEST_P(WrittenWhileGathered, IsSeenAfterUnshard) {
  expect_seen([](testing::ShardedModel& model, const at::Tensor&) {
    unshard(*model.blocks[0]);
    unshard(model);
    halve(model);
  });
}

TEST_P(WrittenWhileGathered, IsSeenAfterAGatherWasBegun) {
  expect_seen([](testing::ShardedModel& model, const at::Tensor&) {
    UnshardHandle handle = start_unshard(model);
    halve(model);
    handle.wait();
  });
}

TEST_P(WrittenWhileGathered, IsSeenWhereBackwardLeavesItGathered) {
  expect_seen([](testing::ShardedModel& model, const at::Tensor& x) {
    set_reshard_after_backward(model, false);
    model(x).sum().backward();
    halve(model);
  });
}

TEST_P(WrittenWhileGathered, IsSeenInAScope) {
  expect_seen([](testing::ShardedModel& model, const at::Tensor&) {
    unshard(model);
    halve(model);
    const UnshardScope scope(model);
    const at::Tensor weight = model.head->weight;
    testing::SmallModel alone(kDim, testing::kHidden, kSizes.classes);
    testing::fill(alone);
    EXPECT_TRUE(weight.to(at::kFloat).allclose(alone.head->weight->mul(0.5), 2e-2, 2e-2));
  });
}

TEST_P(WrittenWhileGathered, IsSeenByAUnitThatIsCalledByItself) {
  expect_seen([](testing::ShardedModel& model, const at::Tensor& x) {
    model(x).sum().backward();  // knows its root from now on
    unshard(*model.blocks[0]);
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.blocks[0]->named_slots()) {
        slot->persistent().zero_();
      }
      EXPECT_TRUE((*model.blocks[0])(x).to(at::kFloat).allclose(x, 2e-2, 2e-2));
    }
    testing::fill(model);
    halve(model);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, WrittenWhileGathered,
    ::testing::Values(
        Arrangement{"one rank", {1}, {"dp"}},
        Arrangement{"bf16 on one rank", {1}, {"dp"}, {.mp_policy = {.param_dtype = at::kBFloat16}}},
        Arrangement{"ZeRO-3", {3}, {"dp"}},
        Arrangement{"ZeRO-2", {2}, {"dp"}, {.reshard_after_forward = false}},
        Arrangement{"hpZ", {4}, {"dp"}, {.post_forward_mesh_size = 2}},
        Arrangement{"HSDP", {2, 2}, {"replicate", "shard"}},
        Arrangement{"offloaded", {2}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return "Arrangement" + std::to_string(info.index); });

// The others' shards have not changed, or are empty.
TEST(WrittenParameter, OfOneRankIsSeenByAll) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    const at::Tensor x = testing::batch(kDim, 0);
    const at::Tensor before = model(x).detach();
    unshard(model);
    if (rank.rank() == 1) {
      const c10::AutoGradMode no_grad(false);
      local_tensor(model.head->slot("weight")->persistent()).mul_(2);
    }
    EXPECT_FALSE(model(x).allclose(before));
  });
}

TEST(WrittenParameter, IsRefusedByAUnitThatIsKeptForABackward) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    testing::ShardedModel model(mesh, {.reshard_after_forward = false});
    const at::Tensor x = testing::batch(kDim, 0);
    const at::Tensor unused = model(x);
    halve(model);
    EXPECT_ERROR((*model.blocks[0])(x), "forward of unit 'block0'",
                 "written since they were gathered", "fsdp::reshard");
    reshard(*model.blocks[0]);
    (*model.blocks[0])(x);
  });
}

/// Halves its weight before it uses it.
struct Shrinking : nn::Module<Shrinking> {
  at::Tensor forward(const at::Tensor& x) {
    {
      const c10::AutoGradMode no_grad(false);
      linear->weight->mul_(0.5);
    }
    return (*linear)(x);
  }

  nn::Child<nn::Linear> linear{*this, "linear", 3, 3};
};

TEST(WrittenParameter, IsRefusedInForwardWhereTheWriteWouldBeLost) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    testing::Filled<Shrinking> model;
    fully_shard(model, mesh);
    EXPECT_ERROR(model(at::ones({2, 3})), "forward of the root unit", "'linear.weight'",
                 "slot->persistent()");
  });
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    testing::Filled<Shrinking> model;
    const at::Tensor before = model.linear->weight->detach().clone();
    fully_shard(model, mesh);
    model(at::ones({2, 3}));
    EXPECT_TRUE(testing::full_tensor(model.linear->slot("weight")->persistent()).equal(before / 2));
  });
}

void double_gathered(nn::Linear& linear) {
  const c10::AutoGradMode no_grad(false);
  linear.weight->mul_(2);
}

TEST(WrittenParameter, IsRefusedWhereTheProgramHasUnshardedIt) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(3, 3);
    fully_shard(linear, mesh);
    const at::Tensor x = at::ones({2, 3});
    const at::Tensor before = linear(x).detach();
    unshard(linear);
    double_gathered(linear);
    EXPECT_ERROR(linear(x), "after unshard of the root unit", "'weight'", "slot->persistent()");
    EXPECT_ERROR(reshard(linear), "after unshard of the root unit", "'weight'");
    EXPECT_TRUE(linear(x).equal(before));
    unshard(linear);
    reshard(linear);
  });
}

// The shards are what is gathered there.
TEST(WrittenParameter, IsKeptOnOneRank) {
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(3, 3);
    const at::Tensor before = linear.weight->detach().clone();
    fully_shard(linear, mesh);
    unshard(linear);
    double_gathered(linear);
    reshard(linear);
    EXPECT_TRUE(testing::full_tensor(linear.slot("weight")->persistent()).equal(2 * before));
  });
}

class WarningsOfWrites final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { heard.push_back(warning.msg()); }
  std::vector<std::string> heard;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

TEST(WrittenParameter, IsWarnedOfAtTheEndOfAScope) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(3, 3);
    fully_shard(linear, mesh);
    const WarningsOfWrites warnings;
    { const UnshardScope scope(linear); }
    EXPECT_TRUE(warnings.heard.empty());
    {
      const UnshardScope scope(linear);
      double_gathered(linear);
    }
    ASSERT_EQ(warnings.heard.size(), 1);
    EXPECT_CONTAINS(warnings.heard[0], "after unshard of", "'weight'", "slot->persistent()");
  });
}

}  // namespace
}  // namespace tessera::fsdp
