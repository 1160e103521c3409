#include "tessera/observe/sharding_table.h"

#include "tessera/nn/linear.h"
#include "testing/distributed.h"

namespace tessera::observe {
namespace {

using Sizes = std::vector<std::int64_t>;

TEST(ShardingTable, ListsPlainParameters) {
  const nn::Linear linear(3, 5);
  const auto table = sharding_table(linear);
  ASSERT_EQ(table.size(), 2u);
  EXPECT_EQ(table[0].name, "weight");
  EXPECT_EQ(table[0].sizes, (Sizes{5, 3}));
  EXPECT_EQ(table[0].placements, "-");
  EXPECT_EQ(table[0].local_sizes, (Sizes{5, 3}));
  EXPECT_EQ(table[0].local_bytes, 60);
  EXPECT_EQ(table[1].name, "bias");
}

TEST(ShardingTable, ListsTheLocalPartsOfEachRank) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    nn::Linear linear(3, 5);
    const auto& slot = linear.slot("weight");
    slot->set(distribute_tensor(slot->get().detach(), mesh, {Shard{0}, Shard{1}}));
    const auto row = sharding_table(linear)[0];
    const bool first_row = rank.rank() < 2, first_column = rank.rank() % 2 == 0;
    EXPECT_EQ(row.sizes, (Sizes{5, 3}));
    EXPECT_EQ(row.placements, "dp: Shard(0), tp: Shard(1)");
    EXPECT_EQ(row.local_sizes, (Sizes{first_row ? 3 : 2, first_column ? 2 : 1}));
    EXPECT_EQ(row.local_bytes, 4 * row.local_sizes[0] * row.local_sizes[1]);
  });
}

TEST(ShardingTable, ListsTheFormThatPersists) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 5);
    const auto& slot = linear.slot("bias");
    slot->set_persistent(
        distribute_tensor(slot->get().detach(), rank.mesh({2}, {"dp"}), {Shard{0}}));
    EXPECT_EQ(sharding_table(linear)[1].placements, "dp: Shard(0)");
  });
}

TEST(ShardingTable, ShowsTheLayoutThatPlacementsCannotSay) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(3, 6);
    const auto layout = Layout::intern({2}, {{Digit{3, {0}}, Digit{2, {}}}});
    const auto local = at::zeros({rank.rank() == 0 ? 4 : 2});
    linear.slot("bias")->set(
        DistributedTensor::from_local(local, {rank.mesh({2}, {"dp"}), layout}, {6}));
    const auto row = sharding_table(linear)[1];
    EXPECT_EQ(row.placements, "[3:m0 x 2]");
    EXPECT_EQ(row.local_sizes, (Sizes{rank.rank() == 0 ? 4 : 2}));
  });
}

}  // namespace
}  // namespace tessera::observe
