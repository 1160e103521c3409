// Ranks of one shard group that made their models with different seeds.

#include "fsdp/training/training.h"
#include "tessera/nn/initialization.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

constexpr auto kDifferent = "are parts of different tensors";

TEST(Origins, AreRefusedForDifferentSeedsBeforeSharding) {
  RunRanks(3, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    nn::init_weights(model, rank.rank() == 2 ? 1 : 0);
    shard(model, rank.mesh({3}, {"dp"}));
    EXPECT_ERROR(local_loss(model, rank), "'head.weight'", "on rank 0 and rank 2", kDifferent);
  });
}

TEST(Origins, AreRefusedForDifferentSeedsAfterSharding) {
  RunRanks(4, [](Rank& rank) {
    const auto model = testing::made_on_meta<SmallModel>(kDim, kHidden, kClasses);
    shard(*model, rank.mesh({2, 2}, {"replicate", "shard"}));
    nn::to_empty(*model, c10::kCPU);
    nn::init_weights(*model, static_cast<std::uint64_t>(rank.rank() % 2));
    EXPECT_ERROR(local_loss(*model, rank), kDifferent, "give all ranks one seed");
  });
}

TEST(Origins, AreAcceptedForOneSeedAlsoWithEmptyShards) {
  RunRanks(4, [](Rank& rank) {
    SmallModel before(kDim, kHidden, kClasses), after(kDim, kHidden, kClasses);
    nn::init_weights(before, 3);
    shard(before, rank.mesh({4}, {"dp"}));
    local_loss(before, rank).backward();
    testing::fill(after);
    shard(after, rank.mesh({4}, {"dp"}));
    nn::init_weights(after, 3);
    local_loss(after, rank).backward();
  });
}

TEST(Origins, DoNotMatterOnceValuesWereWritten) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    nn::init_weights(model, static_cast<std::uint64_t>(rank.rank()));
    shard(model, rank.mesh({2}, {"dp"}));
    const c10::AutoGradMode no_grad(false);
    for (const auto& [name, slot] : model.named_slots()) {
      slot->persistent().fill_(0.5);
    }
    const c10::AutoGradMode grad(true);
    local_loss(model, rank).backward();
  });
}

}  // namespace
}  // namespace tessera::fsdp
