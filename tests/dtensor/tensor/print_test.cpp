#include <sstream>

#include "tessera/comm/trace.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/factories.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

DeviceMesh square(int rank) {
  return init_device_mesh(comm::fake_world(rank, 4), {2, 2}, {"dp", "tp"});
}

TEST(Printing, ShowsPlacementsMeshAndThisRanksValues) {
  const auto x = arange(0, 7, 1, square(2), {Shard{0}, Replicate{}}, at::kFloat);
  std::ostringstream out;
  out << x;
  EXPECT_CONTAINS(out.str(), "DistributedTensor([7], Float", "dp=2, tp=2",
                  "[Shard(0), Replicate()]", "rank 2 holds [4:7]:", " 4\n 5\n 6");
}

TEST(Printing, StreamsASpec) {
  const auto x = zeros({8, 4}, square(0), {Shard{0}, Replicate{}});
  EXPECT_EQ(detail::concat(x.spec()), "DeviceMesh((dp=2, tp=2), cpu), [m0 | -]");
}

TEST(Printing, ShowsEveryBlockOfAPartInSeveral) {
  const auto x =
      zeros({8}, init_device_mesh(comm::fake_world(1, 2), {2}, {"x"}), {StridedShard{0, 2}});
  EXPECT_CONTAINS(to_string(x), "holds [2:4] and [6:8]");
}

TEST(Printing, LeavesOutMany) {
  EXPECT_CONTAINS(to_string(zeros({64, 64}, square(0), {Shard{0}, Replicate{}})),
                  "(2048 elements)");
}

TEST(Printing, ShowsEmptyPartsAndScalars) {
  EXPECT_CONTAINS(to_string(zeros({2}, square(3), {Shard{0}, Shard{0}})), "rank 3 holds nothing");
  EXPECT_CONTAINS(to_string(full({}, 2.5, square(3), {Replicate{}, Partial{}})), "Partial(sum)",
                  "0");
  EXPECT_EQ(to_string(DistributedTensor()), "DistributedTensor()");
}

TEST(Printing, ReducesWhatIsPartial) {
  RunRanks(3, [](Rank& rank) {
    const auto local = at::full({2}, rank.rank() + 1.0);
    const auto x = DistributedTensor::from_local(local, rank.mesh({3}, {"x"}), {Partial{}});
    EXPECT_CONTAINS(to_string(x), "Partial(sum)", "holds, reduced, [0:2]:", " 6\n 6");
    EXPECT_EQ(x.placements(), Placements{Partial{}});
  });
}

TEST(Printing, ShowsTheTermOfOneRankOnThatRankAlone) {
  const testing::DebugChecks none("0");
  RunRanks(3, [](Rank& rank) {
    const auto local = at::full({2}, rank.rank() + 1.0);
    const auto x = DistributedTensor::from_local(local, rank.mesh({3}, {"x"}), {Partial{}});
    if (rank.rank() != 1) {
      return;
    }
    EXPECT_CONTAINS(local_to_string(x), "Partial(sum)", "rank 1 holds [0:2]:", " 2\n 2");
    EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, 0);
  });
}

TEST(Printing, NeedsNoValues) {
  EXPECT_CONTAINS(to_string(zeros({4}, square(0), {Shard{0}, Replicate{}}, at::kMeta)), "meta");
}

TEST(Printing, AnErrorForAPlainHandleNamesToString) {
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {4}, {4, 3}}) {
    const at::Tensor x = zeros(sizes, square(0), {Replicate{}, Replicate{}});
    std::ostringstream out;
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROWN(c10::Error, out << x, "tessera::to_string");
    }
    EXPECT_THROWN(c10::Error, x.add(1).data_ptr<float>(), "to_local()");
    EXPECT_TRUE(at::equal(DistributedTensor(x.add(0)).full_tensor(), at::zeros(sizes)));
  }
}

/// Split unevenly within what a flattening made one dimension: no placements say so.
DistributedTensor without_placements(int rank) {
  const auto mesh = init_device_mesh(comm::fake_world(rank, 2), {2}, {"x"});
  const auto layout = Layout::intern({2}, {{Digit{3, {0}}, Digit{2, {}}}});
  return DistributedTensor::from_local(at::full({rank == 0 ? 4 : 2}, rank + 1.0), {mesh, layout},
                                       {6});
}

TEST(Printing, ShowsALayoutThatHasNoPlacements) {
  const auto x = without_placements(1);
  EXPECT_ERROR(x.placements(), "has no form as a list of placements");
  EXPECT_CONTAINS(to_string(x), "[3:m0 x 2]", "holds [4:6]", " 2\n 2");
  EXPECT_CONTAINS(visualize(x), "[6] on", "[3:m0 x 2]", "0:4", "4:6");
}

}  // namespace
}  // namespace tessera
