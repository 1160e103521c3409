#include "tessera/fsdp/parameter_copy.h"

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

TEST(ParameterCopy, IsAnIndependentClone) {
  RunRanks(3, [](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}), {}, {4, 7, 2});
    const auto copies = clone_parameters(model);
    const auto slots = model.named_slots();
    ASSERT_EQ(copies.size(), slots.size());
    local_loss(model, rank).backward();
    testing::descend(model, 1.0);
    Filled<SmallModel> unchanged(4, 7, 2);
    const auto expected = unchanged.named_slots();
    for (std::size_t i = 0; i < copies.size(); ++i) {
      EXPECT_EQ(copies[i].first, slots[i].first);
      EXPECT_FALSE(copies[i].second.requires_grad());
      EXPECT_TRUE(full_tensor(copies[i].second).equal(expected[i].second->get().detach()));
    }
  });
}

TEST(ParameterCopy, AveragesShardsWithoutCommunication) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    SmallModel model(4, 7, 2), average(4, 7, 2), alone(4, 7, 2);
    for (SmallModel* m : {&model, &average, &alone}) {
      testing::fill(*m);
    }
    shard(model, mesh);
    shard(average, mesh);
    local_loss(model, rank).backward();
    testing::descend(model, 1.0);
    const at::Tensor moved = full_tensor(model.head->slot("weight")->persistent()).clone();
    const comm::TrafficTable before = rank.world()->traffic().table();
    average_parameters(average, model, 0.75);
    EXPECT_TRUE(rank.world()->traffic().since(before).empty());
    const at::Tensor expected = alone.head->weight->detach().mul(0.75).add(moved.mul(0.25));
    EXPECT_TRUE(full_tensor(average.head->slot("weight")->persistent()).allclose(expected));
  });
}

TEST(ParameterCopy, ShowsInTheNextForward) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    SmallModel model(4, 7, 2), other(4, 7, 2);
    testing::fill(model);
    for (const auto& [name, slot] : other.named_slots()) {
      slot->get().detach().zero_();
    }
    shard(model, mesh);
    shard(other, mesh);
    unshard(other);
    const at::Tensor before = local_loss(other, rank).detach();
    copy_parameters(model, other);
    EXPECT_EQ(before.item<double>(), 0.0);
    EXPECT_EQ(local_loss(other, rank).item<double>(), local_loss(model, rank).item<double>());
  });
}

TEST(ParameterCopy, RefusesModulesThatLieOtherwise) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 7, 2), plain(4, 7, 2), smaller(4, 7, 2, 1);
    testing::fill(model);
    testing::fill(plain);
    testing::fill(smaller);
    const at::Tensor before = plain.head->weight->detach().clone();
    shard(model, rank.mesh({2}, {"dp"}));
    EXPECT_ERROR(copy_parameters(model, plain), "is not laid out as the one");
    EXPECT_ERROR(copy_parameters(smaller, plain),
                 "there is no parameter 'block1.up.weight' to copy from");
    EXPECT_ERROR(average_parameters(plain, plain, 1.5), "a decay of 1.5 is outside [0, 1]");
    EXPECT_TRUE(plain.head->weight->detach().equal(before));
  });
}

}  // namespace
}  // namespace tessera::fsdp
