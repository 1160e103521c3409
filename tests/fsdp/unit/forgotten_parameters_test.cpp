// A model with only some parts made units.

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

void shard_blocks(SmallModel& model, const DeviceMesh& mesh) {
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh);
  }
}

TEST(ForgottenParameters, AreRefusedInTheFirstForwardOfATraining) {
  RunRanks(2, [](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    shard_blocks(model, rank.mesh({2}, {"dp"}));
    {
      const c10::AutoGradMode no_grad(false);
      local_loss(model, rank);
    }
    EXPECT_ERROR(local_loss(model, rank), "2 of its parameters", "'head.weight'",
                 "Options::ignored");
  });
}

TEST(ForgottenParameters, AreTrainedByAUnitOfTheWholeModel) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    shard_blocks(model, rank.mesh({2}, {"dp"}));
    replicate(model, rank.mesh({2}, {"dp"}));
    local_loss(model, rank).backward();
    expect_gradients(model, expected);
  });
}

TEST(ForgottenParameters, MayBeFrozenOrIgnoredOrOnOneRank) {
  RunOnMesh({2, 1}, {"dp", "one"}, [](Rank& rank, const DeviceMesh& mesh) {
    SmallModel frozen(kDim, kHidden, kClasses), ignored(kDim, kHidden, kClasses);
    SmallModel alone(kDim, kHidden, kClasses);
    for (SmallModel* model : {&frozen, &ignored, &alone}) {
      testing::fill(*model);
    }
    shard_blocks(frozen, mesh["dp"]);
    for (const auto& [name, slot] : frozen.head->slots()) {
      slot->get().set_requires_grad(false);
    }
    local_loss(frozen, rank).backward();
    shard_blocks(alone, mesh["one"]);
    local_loss(alone, rank).backward();
    Options left;
    for (const auto& [name, slot] : ignored.head->slots()) {
      left.ignored.insert(slot);
    }
    fully_shard(*ignored.blocks[0], mesh["dp"], left);
    fully_shard(*ignored.blocks[1], mesh["dp"]);
    fully_shard(*ignored.blocks[2], mesh["dp"]);
    local_loss(ignored, rank).backward();
    EXPECT_FALSE(tessera::is_distributed(ignored.head->weight->grad()));
  });
}

}  // namespace
}  // namespace tessera::fsdp
