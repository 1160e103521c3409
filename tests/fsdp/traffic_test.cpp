// What one step of training sends, exactly.
#include <gtest/gtest.h>

#include "fsdp/small_model.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera::fsdp {
namespace {

using testing::SmallModel;

constexpr std::int64_t kDim = 7, kHidden = 10, kClasses = 3, kDepth = 3;

std::int64_t padded(std::int64_t rows, std::int64_t ranks) {
  return (rows + ranks - 1) / ranks;
}

/// Elements of one rank's shard of a unit.
std::int64_t block_shard(std::int64_t ranks) {
  return padded(kHidden, ranks) * (kDim + 1) + padded(kDim, ranks) * (kHidden + 1);
}
std::int64_t head_shard(std::int64_t ranks) {
  return padded(kClasses, ranks) * (kDim + 1);
}

/// `options(i)`: of block i.
comm::TrafficTable traffic_of_step(Rank& rank, const std::function<Options(int)>& options,
                                   const Options& root = {}) {
  SmallModel model(kDim, kHidden, kClasses, kDepth);
  testing::fill(model);
  const DeviceMesh mesh = rank.mesh({rank.size()}, {"dp"});
  for (int i = 0; i < kDepth; ++i) {
    fully_shard(*model.blocks[static_cast<std::size_t>(i)], mesh, options(i));
  }
  fully_shard(model, mesh, root);
  const comm::TrafficTable before = rank.world()->traffic().table();
  testing::loss_of(model, testing::wave({4, kDim}, 1), 0, 4).backward();
  return rank.world()->traffic().since(before);
}

TEST(Traffic, IsTwoGathersAndOneReductionAUnit) {
  RunRanks(4, [](Rank& rank) {
    const auto traffic = traffic_of_step(rank, [](int) { return Options{}; });
    EXPECT_EQ(traffic.size(), 2u);
    const comm::Traffic gathers = traffic.at({"dp", "all_gather"});
    EXPECT_EQ(gathers.calls, 2 * kDepth + 1);  // the root is not freed after forward
    EXPECT_EQ(gathers.bytes, 4 * (2 * kDepth * block_shard(4) + head_shard(4)));
    const comm::Traffic reductions = traffic.at({"dp", "reduce_scatter"});
    EXPECT_EQ(reductions.calls, kDepth + 1);
    EXPECT_EQ(reductions.bytes, 4 * 4 * (kDepth * block_shard(4) + head_shard(4)));
  });
}

TEST(Traffic, IsOneGatherForABlockThatStaysGathered) {
  RunRanks(3, [](Rank& rank) {
    const auto traffic = traffic_of_step(
        rank, [](int i) { return Options{.reshard_after_forward = i + 1 < kDepth}; });
    EXPECT_EQ(traffic.at({"dp", "all_gather"}).calls, 2 * kDepth);
    EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).calls, kDepth + 1);
  });
}

TEST(Traffic, IsOneGatherAUnitWithoutResharding) {
  RunRanks(2, [](Rank& rank) {
    const auto traffic =
        traffic_of_step(rank, [](int) { return Options{.reshard_after_forward = false}; });
    EXPECT_EQ(traffic.at({"dp", "all_gather"}).calls, kDepth + 1);
  });
}

TEST(Traffic, HalvesTheGathersInBfloat16) {
  RunRanks(2, [](Rank& rank) {
    const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    const auto traffic = traffic_of_step(rank, [&](int) { return Options{.mp_policy = policy}; },
                                         {.mp_policy = policy});
    EXPECT_EQ(traffic.at({"dp", "all_gather"}).bytes,
              2 * (2 * kDepth * block_shard(2) + head_shard(2)));
    EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).bytes,
              2 * 4 * (kDepth * block_shard(2) + head_shard(2)));
  });
}

TEST(Traffic, IsNoneOnOneRank) {
  RunRanks(1, [](Rank& rank) {
    EXPECT_TRUE(traffic_of_step(rank, [](int) { return Options{}; }).empty());
  });
}

}  // namespace
}  // namespace tessera::fsdp
