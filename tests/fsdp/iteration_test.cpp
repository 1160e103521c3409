// Forwards and backwards in other orders than one after the other.
#include <gtest/gtest.h>

#include "fsdp/training.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera::fsdp {
namespace {

using testing::batch;
using testing::ErrorsOfRanks;
using testing::kRows;
using testing::local_loss;
using testing::shard;
using testing::SmallModel;
using testing::whole;

TEST(Iteration, AddsTheGradientsOfTwoBackwards) {
  RunRanks(3, [](Rank& rank) {
    SmallModel model(5, 7, 2);
    testing::fill(model);
    shard(model, rank.mesh({3}, {"dp"}));
    local_loss(model, rank).backward();
    const at::Tensor once = whole(model.head->slot("weight")->persistent().grad());
    local_loss(model, rank).backward();
    EXPECT_TRUE(whole(model.head->slot("weight")->persistent().grad()).allclose(once.mul(2)));
  });
}

TEST(Iteration, RunsBackwardTwiceThroughOneGraph) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(5, 7, 2);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor loss = local_loss(model, rank);
    loss.backward({}, /*retain_graph=*/true);
    const nn::SlotPtr& slot = model.blocks[0]->down->slot("weight");
    const at::Tensor once = whole(slot->persistent().grad());
    loss.backward();
    EXPECT_TRUE(whole(slot->persistent().grad()).allclose(once.mul(2)));
  });
}

TEST(Iteration, AddsUpTwoForwardsBeforeOneBackward) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(5, 7, 2);
    SmallModel alone(5, 7, 2);
    testing::fill(model);
    testing::fill(alone);
    shard(model, rank.mesh({2}, {"dp"}));
    local_loss(model, rank).add(local_loss(model, rank, 1)).backward();
    testing::loss_of(alone, batch(5, 0), 0, kRows)
        .add(testing::loss_of(alone, batch(5, 1), 0, kRows))
        .backward();
    const auto expected = alone.named_slots();
    std::size_t i = 0;
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(
          whole(slot->persistent().grad()).allclose(expected[i++].second->get().grad(), 1e-4, 1e-6))
          << name;
    }
  });
}

TEST(Iteration, ForgetsAForwardThatNoBackwardFollowed) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor before = local_loss(model, rank).detach();
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.named_slots()) local_tensor(slot->persistent()).zero_();
    }
    EXPECT_NE(before.item<double>(), 0.0);
    EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  });
}

TEST(Iteration, FreesEverythingAfterAForwardWithoutGradients) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

TEST(Iteration, StartsAfreshAfterAForwardThatFailed) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    bool fails = true;
    model.blocks[0]->up->add_forward_hook(
        [&](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!fails, "not this time"); });
    EXPECT_THROW(local_loss(model, rank), Error);
    fails = false;
    {
      const c10::AutoGradMode no_grad(false);
      for (const auto& [name, slot] : model.named_slots()) local_tensor(slot->persistent()).zero_();
    }
    EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  });
}

TEST(Iteration, EndsAllRanksWhenOneFails) {
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    testing::fill(model);
    shard(model, rank.mesh({3}, {"dp"}));
    model.blocks[1]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      TESSERA_CHECK(rank.rank() != 1, "rank 1 stops here");
    });
    local_loss(model, rank).backward();
  });
  EXPECT_EQ(errors[1], "rank 1 stops here");
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

}  // namespace
}  // namespace tessera::fsdp
