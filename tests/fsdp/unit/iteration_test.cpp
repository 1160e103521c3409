// Forwards and backwards in other orders than one after the other.
#include <c10/core/InferenceMode.h>

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

using testing::ErrorsOfRanks;

// What inference makes, training needs as well; on one rank whole tensors are the shards.
TEST(Iteration, TrainsAfterAForwardInInferenceMode) {
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  for (const int ranks : {1, 3}) {
    RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
      {
        const c10::InferenceMode inference(true);
        local_loss(model, rank);
        const UnshardScope whole_block(*model.blocks[0]);
        start_unshard(*model.blocks[1]);
      }
      local_loss(model, rank).backward();
      testing::expect_gradients(model, expected);
    });
  }
}

/// x times a weight that another unit hands out.
struct Lending : nn::Module<Lending> {
  class Unit : public nn::Module<Unit> {
   public:
    Unit() { weight = register_slot("weight", testing::uniform_values({5, 4}, 1)); }
    at::Tensor forward(const at::Tensor&) { return weight->t(); }

    nn::Parameter weight;
  };
  at::Tensor forward(const at::Tensor& x) { return x.mm((*unit)(x)); }

  nn::Child<Unit> unit{*this, "unit"};
};

TEST(Iteration, LendsViewsOfParametersThatForwardDoesNotFree) {
  const at::Tensor x = testing::uniform_values({3, 4}, 2);
  Lending alone;
  alone(x).square().sum().backward();
  RunOnMesh({2}, {"dp"}, [&](const DeviceMesh& mesh) {
    Lending model;
    fully_shard(*model.unit, mesh);
    fully_shard(model, mesh);
    set_reshard_after_forward(*model.unit, false);
    for (int step = 1; step <= 2; ++step) {
      model(x).square().sum().backward();
      testing::expect_gradients(model, {alone.unit->weight->grad()}, step);
    }
  });
}

TEST(Iteration, RunsBackwardTwiceThroughOneGraph) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const at::Tensor loss = local_loss(model, rank);
    loss.backward({}, /*retain_graph=*/true);
    const nn::SlotPtr& slot = model.blocks[0]->down->slot("weight");
    const at::Tensor once = full_tensor(slot->persistent().grad());
    loss.backward();
    EXPECT_TRUE(full_tensor(slot->persistent().grad()).allclose(once.mul(2)));
  });
}

TEST(Iteration, AddsUpTwoForwardsBeforeOneBackward) {
  const std::vector<at::Tensor> expected = testing::gradients_alone({}, {0, 1});
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    local_loss(model, rank).add(local_loss(model, rank, 1)).backward();
    testing::expect_gradients(model, expected);
  });
}

TEST(Iteration, ForgetsAForwardThatNoBackwardFollowed) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const at::Tensor before = local_loss(model, rank).detach();
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.named_slots()) {
        local_tensor(slot->persistent()).zero_();
      }
    }
    EXPECT_NE(before.item<double>(), 0.0);
    EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  });
}

TEST(Iteration, FreesEverythingAfterAForwardWithoutGradients) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

TEST(Iteration, StartsAfreshAfterAForwardThatFailed) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    bool fails = true;
    model.blocks[0]->up->add_forward_hook(
        [&](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!fails, "not this time"); });
    EXPECT_ERROR(local_loss(model, rank), "not this time");
    fails = false;
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.named_slots()) {
        local_tensor(slot->persistent()).zero_();
      }
    }
    EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  });
}

TEST(Iteration, EndsAllRanksWhenOneFails) {
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}));
    model.blocks[1]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      TESSERA_CHECK(rank.rank() != 1, "rank 1 stops here");
    });
    local_loss(model, rank).backward();
  });
  EXPECT_TRUE(errors[1].starts_with("rank 1 stops here (in module 'block1', ")) << errors[1];
  EXPECT_TRUE(errors[1].ends_with(", in unit 'block1')")) << errors[1];
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

}  // namespace
}  // namespace tessera::fsdp
