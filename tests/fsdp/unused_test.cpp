// Tests parameters and units that some ranks do not use.

#include "fsdp/training/training.h"
#include "testing/environment.h"

namespace tessera::fsdp::unused {

struct Branches : nn::Module<Branches> {
  explicit Branches(std::int64_t in = 3, std::int64_t out = 2)
      : left(*this, "left", in, out), right(*this, "right", in, out) {
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool go_left) { return (go_left ? *left : *right)(x); }
  nn::Child<nn::Linear> left, right;
};

// With uneven shards, FSDP packs the gradients into a buffer before the reduction. With even
// shards, FSDP reduces the gradient tensors (or zeros) directly.
TEST(UnusedParameter, OnOneRankCountsForZero) {
  for (const auto& [in, out] : {std::pair{3, 2}, {4, 4}}) {
    const at::Tensor x = uniform_values({4, in}, 9);
    Branches alone(in, out);
    alone(x, true).square().sum().div(2).backward();
    alone(x, false).square().sum().div(2).backward();
    RunOnMesh({2}, {"dp"}, [&, in = in, out = out](Rank& rank, const DeviceMesh& mesh) {
      Branches model(in, out);
      fully_shard(model, mesh);
      model(x, rank.rank() == 0).square().sum().backward();
      expect_gradients(model, gradients_of(alone));
      const at::Tensor before = full_grad(*model.right);
      model(x, true).sum().backward();
      EXPECT_TRUE(full_grad(*model.right).equal(before));
    });
  }
}

// Rank 2 skips the unit 'extra' and starts the backward of 'base', while the other ranks gather
// 'extra'. Both units have tensors of equal sizes.
TEST(UnusedUnit, OnOneRankIsReportedWithTheRemedy) {
  const std::vector<std::string> errors = ErrorsOfRanks(4, [](Rank& rank) {
    Filled<OptionalLayer> model;
    const DeviceMesh mesh = rank.mesh({4}, {"dp"});
    shard_units({&*model.base, &*model.extra, &model}, mesh);
    model(uniform_values({4, 3}, 9), rank.rank() != 2).sum().backward();
  });
  EXPECT_CONTAINS(errors, "unit 'extra'");
  EXPECT_TRUE(std::ranges::any_of(errors, [](const std::string& error) {
    return bool(testing::Contains(error, {"every rank must call", "rank 2 calls"}));
  })) << errors[0];
}

/// Runs one backward per element of `go_left`. Returns the names of the branches with a gradient.
std::string used_branches(Rank& rank, const DeviceMesh& mesh, const std::vector<bool>& go_left,
                          bool overlap = false) {
  Branches model;
  fully_shard(model, mesh);
  for (std::size_t i = 0; i < go_left.size(); ++i) {
    const bool last = i + 1 == go_left.size();
    overlap ? set_is_last_backward(model, last) : set_requires_gradient_sync(model, last);
    model(uniform_values({4, 3}, rank.rank()), go_left[i]).sum().backward();
  }
  std::string used;
  for (const auto& [name, slot] : model.named_slots()) {
    used += name.ends_with("weight") && slot->persistent().grad().defined() ? name + " " : "";
  }
  return used;
}

TEST(UnusedParameter, OnAllRanksHasNoGradient) {
  for (const bool shared_memory : {true, false}) {
    const testing::SharedMemory setting(shared_memory);
    RunRanks(4, [](Rank& rank) {
      const bool first = rank.rank() == 0;
      for (const DeviceMesh& mesh :
           {rank.mesh({4}, {"dp"}), rank.mesh({2, 2}, {"replicas", "dp"})}) {
        EXPECT_EQ(used_branches(rank, mesh, {true}), "left.weight ");
        EXPECT_EQ(used_branches(rank, mesh, {!first}), "left.weight right.weight ");
        EXPECT_EQ(used_branches(rank, mesh, {false, false}), "right.weight ");
        EXPECT_EQ(used_branches(rank, mesh, {false, false}, true), "right.weight ");
        EXPECT_EQ(used_branches(rank, mesh, {first, false}), "left.weight right.weight ");
      }
    });
  }
  RunRanks(1, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({1}, {"dp"});
    EXPECT_EQ(used_branches(rank, mesh, {true}), "left.weight ");
    EXPECT_EQ(used_branches(rank, mesh, {true, true}, true), "left.weight ");
  });
}

}  // namespace tessera::fsdp::unused
