// Models that are converted, or given other tensors, after they were sharded.

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

std::vector<at::Tensor> gradients_in_double(std::int64_t rows) {
  Filled<SmallModel> alone(7, 10, 3);
  alone.to(at::kDouble);
  testing::loss_of(alone, testing::batch(7, 0).to(at::kDouble), 0, rows).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : alone.named_slots()) {
    gradients.push_back(slot->get().grad());
  }
  return gradients;
}

void expect_gradients_in_double(SmallModel& model, const Rank& rank,
                                const std::vector<at::Tensor>& expected) {
  const std::int64_t rows = testing::kRows / rank.size();
  testing::loss_of(model, testing::batch(7, 0).to(at::kDouble), rank.rank() * rows, rows)
      .backward();
  std::size_t i = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor gradient = full_tensor(slot->persistent().grad());
    EXPECT_EQ(gradient.scalar_type(), at::kDouble) << name;
    EXPECT_TRUE(gradient.allclose(expected[i++], 1e-10, 1e-12)) << name;
  }
}

class Conversion : public ::testing::TestWithParam<int> {};

TEST_P(Conversion, BeforeTheFirstForwardConvertsComputationToo) {
  const std::vector<at::Tensor> expected = gradients_in_double(testing::kRows);
  RunSharded(GetParam(), [&](Rank& rank, ShardedModel& model) {
    model.to(at::kDouble);
    expect_gradients_in_double(model, rank, expected);
  });
}

TEST_P(Conversion, BetweenStepsAppliesToTheNextStep) {
  const std::vector<at::Tensor> expected = gradients_in_double(testing::kRows);
  RunSharded(GetParam(), [&](Rank& rank, ShardedModel& model) {
    testing::local_loss(model, rank).backward();
    for (const auto& [name, slot] : model.named_slots()) {
      slot->persistent().mutable_grad().reset();
    }
    model.to(at::kDouble);
    expect_gradients_in_double(model, rank, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Conversion, ::testing::Values(1, 3));

TEST(Conversion, IsRefusedByNameForOnlySomeParametersOfAUnit) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    linear.slot("bias")->set(linear.bias->detach().to(at::kDouble).requires_grad_());
    EXPECT_ERROR(linear(at::ones({2, 3})), "'bias'");
  });
}

TEST(Conversion, IsRefusedWhileAUnitIsGathered) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 5);
    const at::Tensor before = linear.weight->detach().to(at::kDouble);
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    unshard(linear);
    EXPECT_ERROR(linear.to(at::kDouble), "'weight'");
    reshard(linear);
    linear.to(at::kDouble);
    unshard(linear);
    EXPECT_TRUE(linear.weight->detach().equal(before));
  });
}

// As a load that assigns does.
TEST(Assignment, NextForwardUsesANewShard) {
  RunOnMesh({3}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<nn::Linear> linear(3, 7, {.bias = false});
    fully_shard(linear, mesh);
    const at::Tensor x = at::ones({1, 3});
    linear(x).sum().backward();
    const at::Tensor other = testing::uniform_values({7, 3}, 9);
    linear.slot("weight")->set(
        distribute_tensor(other, mesh, {Shard{0}}).tensor().detach().requires_grad_());
    const at::Tensor out = linear(x);
    EXPECT_TRUE(out.allclose(x.matmul(other.t())));
    out.sum().backward();
    EXPECT_TRUE(full_tensor(linear.slot("weight")->persistent()).equal(other));
    EXPECT_TRUE(full_tensor(linear.slot("weight")->persistent().grad()).equal(at::ones({7, 3})));
  });
}

TEST(Assignment, AnotherLayoutIsRefused) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<nn::Linear> linear(4, 6, {.bias = false});
    fully_shard(linear, mesh);
    linear.slot("weight")->set(distribute_tensor(at::ones({6, 4}), mesh, {Shard{1}}).tensor());
    EXPECT_ERROR(linear(at::ones({1, 4})), "'weight' was replaced");
  });
}

// What checkpoints and copies take, whatever forward has left whole.
TEST(GatheredUnits, PersistAsShards) {
  RunRanks(3, [](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}), {}, {4, 7, 2});
    const auto local_parameters = [&] {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, slot] : model.named_slots()) {
        tensors.push_back(local_tensor(slot->persistent()).detach().clone());
      }
      return tensors;
    };
    const auto before = local_parameters();
    const at::Tensor loss = testing::local_loss(model, rank);  // the root is whole until backward
    EXPECT_TRUE(model.head->slot("weight")->gathered());
    const auto during = local_parameters();
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(during[i].equal(before[i]));
    }
    loss.backward();
  });
}

}  // namespace
}  // namespace tessera::fsdp
