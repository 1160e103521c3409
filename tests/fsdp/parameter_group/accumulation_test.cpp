// Micro-batches whose gradients are reduced later.

#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"

namespace tessera::fsdp {
namespace {

using testing::gradients_of;
using testing::RecordingStreams;

/// Two units; a call uses one or both.
struct Pair : nn::Module<Pair> {
  at::Tensor forward(const at::Tensor& x, bool both) {
    const at::Tensor y = (*b)(x).square().sum();
    return both ? y + (*a)(x).square().sum() : y;
  }

  nn::Child<nn::Linear> a{*this, "a", 3, 5}, b{*this, "b", 3, 5};
};

void shard_units(Pair& model, const DeviceMesh& mesh) {
  testing::fill(model);
  fully_shard(*model.a, mesh);
  fully_shard(*model.b, mesh);
  fully_shard(model, mesh);
}

at::Tensor rows_of(const Rank& rank) {
  return testing::uniform_values({2, 3}, rank.rank());
}

/// The mean over ranks of the gradients of both micro-batches.
std::vector<at::Tensor> pair_alone(int ranks) {
  Filled<Pair> alone;
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor x = testing::uniform_values({2, 3}, rank);
    alone(x, true).add(alone(x, false)).div(ranks).backward();
  }
  return gradients_of(alone);
}

TEST(KeptGradients, AreReduceScatteredIfTheLastMicroBatchDoesNotUseTheUnit) {
  const std::vector<at::Tensor> expected = pair_alone(4);
  RunRanks(4, [&](Rank& rank) {
    Pair model;
    shard_units(model, rank.mesh({4}, {"dp"}));
    set_requires_gradient_sync(model, false);
    model(rows_of(rank), true).backward();
    set_requires_gradient_sync(model, true);
    model(rows_of(rank), false).backward();
    expect_gradients(model, expected);
  });
}

TEST(KeptGradients, AreAllReducedIfTheLastMicroBatchDoesNotUseTheUnit) {
  const std::vector<at::Tensor> expected = pair_alone(4);
  RunRanks(4, [&](Rank& rank) {
    Pair model;
    shard_units(model, rank.mesh({2, 2}, {"replicate", "shard"}));
    set_requires_all_reduce(model, false);
    model(rows_of(rank), true).backward();
    set_requires_all_reduce(model, true);
    model(rows_of(rank), false).backward();
    expect_gradients(model, expected);
  });
}

TEST(KeptGradients, AreReducedForAParameterFrozenSince) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4, {.bias = false});
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    const nn::SlotPtr slot = linear.slot("weight");
    const at::Tensor x = at::ones({1, 3}).requires_grad_();
    set_requires_gradient_sync(linear, false);
    linear(x).sum().backward();
    slot->persistent().set_requires_grad(false);
    set_requires_gradient_sync(linear, true);
    linear(x).sum().backward();
    ASSERT_TRUE(slot->persistent().grad().defined());
    EXPECT_TRUE(full_tensor(slot->persistent().grad()).equal(at::ones({4, 3})));
  });
}

TEST(LastBackward, LeavesTheReductionOfTheOthersUnderWay) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  RunSharded(2, [&](Rank& rank, ShardedModel& model) {
    const auto streams = testing::record(model);
    set_is_last_backward(model, false);
    local_loss(model, rank, 0).backward();
    // The root is reduced last, and was not waited for yet.
    EXPECT_ERROR(model.head->slot("weight")->persistent().grad().sum(), "is not reduced");
    EXPECT_TRUE(model.blocks[2]->up->slot("weight")->persistent().grad().defined());
    set_is_last_backward(model, true);
    local_loss(model, rank, 1).backward();
    expect_gradients(model, expected);
    EXPECT_EQ(std::ranges::count_if(
                  streams->notes(),
                  [](const std::string& note) { return note.starts_with("reduce_scatter"); }),
              8);
  });
}

/// A unit whose gradient needs its input alone, behind another.
struct Scaled : nn::Module<Scaled> {
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }
  nn::Child<nn::Linear> first{*this, "first", 3, 5}, second{*this, "second", 5, 5};
};

TEST(UnshardInBackward, GathersOneUnitLessAndChangesNoValue) {
  Filled<Scaled> alone;
  const at::Tensor x = testing::uniform_values({4, 3}, 2);
  alone(x).square().sum().backward();
  const std::vector<at::Tensor> expected = gradients_of(alone);
  RunRanks(2, [&](Rank& rank) {
    for (const bool gather : {true, false}) {
      Filled<Scaled> model;
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      fully_shard(*model.first, mesh);
      fully_shard(*model.second, mesh);
      fully_shard(model, mesh);
      set_unshard_in_backward(*model.first, gather);  // whose input needs no gradient
      const comm::TrafficTable before = rank.world()->traffic().table();
      model(x).square().sum().backward();
      const comm::TrafficTable traffic = rank.world()->traffic().since(before);
      EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, gather ? 4 : 3);
      EXPECT_EQ(traffic_of(traffic, "dp", "reduce_scatter").calls, 2);
      expect_gradients(model, expected);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
