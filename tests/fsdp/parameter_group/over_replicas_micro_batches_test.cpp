// Micro-batches of models whose shards lie over the replicas.
#include <gtest/gtest.h>

#include <any>
#include <optional>
#include <string>
#include <utility>

#include "fsdp/parameter_group/over_replicas.h"
#include "tessera/fsdp/wrap_policy.h"

namespace tessera::fsdp {
namespace {

using testing::expect_gradients;
using testing::full_tensor;
using testing::Gathers;
using testing::gathers;
using testing::gradients_alone;
using testing::hybrid_mesh;
using testing::local_loss;
using testing::ShardedModel;
using testing::SmallModel;

// The stages of a pipeline: all forwards, then all backwards.
TEST(ShardsOverReplicas, AreGatheredOnceForSeveralForwards) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2),
                       {.reshard_after_forward = true, .shard_over_replicas = true});
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_is_last_backward(model, false);
    std::vector<at::Tensor> losses;
    for (int i = 0; i < 3; ++i) {
      losses.push_back(local_loss(model, rank, i));
    }
    losses[0].backward();
    losses[1].backward();
    set_is_last_backward(model, true);
    losses[2].backward();
    EXPECT_EQ(gathers(rank, before), (Gathers{4, 5 * 4}));
    expect_gradients(model, expected);
  });
}

/// Options under which gradients are those of one process.
class ShardOverReplicasWith : public ::testing::TestWithParam<std::pair<const char*, Options>> {};

at::Tensor doubled(const std::vector<at::Tensor>& tensors, const std::any&) {
  return tensors.front().mul(2);
}

std::optional<AllGatherExtension> sent_halved(const std::string&, const at::Tensor&) {
  return AllGatherExtension{
      [](const at::Tensor& shard) -> EncodedShard { return {.tensors = {shard.mul(0.5)}}; },
      doubled};
}

std::optional<Placement> last_dim(const std::string&, const at::Tensor& parameter) {
  return Shard{parameter.dim() - 1};
}

TEST_P(ShardOverReplicasWith, AccumulatesAsOneProcess) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunRanks(6, [&](Rank& rank) {
    Options options = GetParam().second;
    options.shard_over_replicas = true;
    ShardedModel model(hybrid_mesh(rank, 2, 3), options);
    const comm::TrafficTable before = rank.world()->traffic().table();
    for (int i = 0; i < 3; ++i) {
      set_is_last_backward(model, i == 2);
      local_loss(model, rank, i).backward();
    }
    EXPECT_EQ(gathers(rank, before).first, 4);
    expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Options, ShardOverReplicasWith,
    ::testing::Values(std::pair{"Zero2", Options{.reshard_after_forward = false}},
                      std::pair{"Zero3", Options{.reshard_after_forward = true}},
                      std::pair{"Offloaded", Options{.offload_policy = OffloadPolicy{}}},
                      std::pair{"Unused", Options{.may_be_unused = true}},
                      std::pair{"Packed", Options{.shard_placement = last_dim}},
                      std::pair{"Encoded", Options{.all_gather_extension = sent_halved}}),
    [](const auto& info) { return std::string(info.param.first); });

TEST(ShardsOverReplicas, AreSentAndKeptInTheTypeOfComputation) {
  RunRanks(4, [](Rank& rank) {
    Options options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    ShardedModel hybrid(hybrid_mesh(rank, 2, 2), options);
    options.shard_over_replicas = true;
    ShardedModel model(hybrid_mesh(rank, 2, 2), options);
    for (int i = 0; i < 3; ++i) {
      for (SmallModel* each :
           {static_cast<SmallModel*>(&hybrid), static_cast<SmallModel*>(&model)}) {
        set_is_last_backward(*each, i == 2);
        local_loss(*each, rank, i).backward();
      }
    }
    std::vector<at::Tensor> expected;
    for (const auto& [name, slot] : hybrid.named_slots()) {
      expected.push_back(full_tensor(slot->persistent().grad()));
    }
    expect_gradients(model, expected);
  });
}

TEST(ShardsOverReplicas, MayBeOfSomeUnitsOnly) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  RunRanks(4, [&](Rank& rank) {
    SmallModel model(testing::kDim, testing::kHidden, testing::kClasses);
    testing::fill(model);
    apply_plan(model, hybrid_mesh(rank, 2, 2),
               plan_units(model, wrap_class<testing::Block>({.shard_over_replicas = true})));
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_is_last_backward(model, false);
    local_loss(model, rank, 0).backward();
    set_is_last_backward(model, true);
    local_loss(model, rank, 1).backward();
    EXPECT_EQ(gathers(rank, before), (Gathers{3, 9 + 2}));
    expect_gradients(model, expected);
  });
}

}  // namespace
}  // namespace tessera::fsdp
