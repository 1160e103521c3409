// Redistribution from one mesh to another.

#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

using testing::counting_values;
const std::vector<Placements>& line() {
  static const std::vector<Placements> all{
      {Replicate{}}, {Shard{0}}, {Shard{1}}, {Partial{}}, {Partial{ReduceOp::kMax}}};
  return all;
}

const std::vector<Placements>& square() {
  static const std::vector<Placements> all{
      {Replicate{}, Replicate{}}, {Shard{0}, Shard{1}},  {Shard{0}, Shard{0}},
      {Replicate{}, Shard{0}},    {Partial{}, Shard{1}}, {StridedShard{0, 2}, Shard{0}},
      {Shard{1}, Replicate{}},    {Partial{}, Partial{}}};
  return all;
}

/// Every pair, there and back, of sizes that do not divide, that leave shards empty, of nothing.
void expect_round_trips(Rank& rank, const DeviceMesh& a, const std::vector<Placements>& as,
                        const DeviceMesh& b, const std::vector<Placements>& bs) {
  for (const auto& sizes : {std::vector<std::int64_t>{7, 5}, {2, 1}, {0, 3}}) {
    for (const auto& from : as) {
      const auto x = distribute_tensor(counting_values(sizes), a, from);
      for (const auto& to : bs) {
        const auto y = x.redistribute(b, to);
        ASSERT_EQ(y.mesh(), b);
        ASSERT_EQ(y.placements(), to);
        const auto text = to_string(from) + " -> " + to_string(to);
        ASSERT_TRUE(at::equal(y.full_tensor(), counting_values(sizes)))
            << rank.rank() << ": " << text;
        ASSERT_TRUE(at::equal(y.redistribute(a, from).full_tensor(), counting_values(sizes)))
            << text;
      }
    }
  }
}

TEST(CrossMeshRedistribute, ALineBecomesASquareAndBack) {
  RunRanks(4, [](Rank& rank) {
    expect_round_trips(rank, rank.mesh({4}, {"x"}), line(), rank.mesh({2, 2}, {"dp", "tp"}),
                       square());
  });
}

TEST(CrossMeshRedistribute, RanksMayStandInAnotherOrder) {
  RunRanks(4, [](Rank& rank) {
    const DeviceMesh turned(rank.world(), {3, 1, 0, 2}, MeshShape({4}, {"y"}));
    expect_round_trips(rank, rank.mesh({4}, {"x"}), {{Shard{0}}, {Replicate{}}}, turned,
                       {{Shard{0}}, {Shard{1}}});
  });
}

TEST(CrossMeshRedistribute, ASliceHoldsWhatTheWholeMeshReplicates) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const char* name : {"dp", "tp"}) {
      expect_round_trips(rank, mesh, square(), mesh[name], line());
      expect_round_trips(rank, mesh[name], line(), mesh, square());
    }
  });
}

TEST(CrossMeshRedistribute, ASliceMayBeRearrangedAsWell) {
  RunOnMesh({2, 2, 2}, {"pp", "dp", "tp"}, [](const DeviceMesh& mesh) {
    const auto flat = mesh[{"dp", "tp"}].flatten();
    const auto x =
        distribute_tensor(counting_values({7, 5}), mesh, {Replicate{}, Shard{0}, Shard{1}});
    const auto y = x.redistribute(flat, {Shard{1}});
    EXPECT_TRUE(at::equal(y.full_tensor(), counting_values({7, 5})));
    const auto back = y.redistribute(mesh, {Shard{1}, Shard{0}, Replicate{}});
    EXPECT_TRUE(at::equal(back.full_tensor(), counting_values({7, 5})));
  });
}

TEST(CrossMeshRedistribute, MovesNothingWhereEveryRankHasItsPart) {
  const testing::DebugChecks none("0");
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& flat) {
    const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
    const auto x = distribute_tensor(counting_values({8, 3}), flat, {Shard{0}});
    const CommunicationScope communication(flat);
    const auto y = x.redistribute(mesh, {Shard{0}, Shard{0}});
    const auto z = distribute_tensor(counting_values({8, 3}), mesh["tp"], {Shard{0}})
                       .redistribute(mesh, {Replicate{}, Shard{0}});
    EXPECT_EQ(communication.total().calls, 0);
    EXPECT_TRUE(at::equal(local_tensor(y), local_tensor(x)));
    EXPECT_TRUE(at::equal(z.full_tensor(), counting_values({8, 3})));
  });
}

TEST(CrossMeshRedistribute, SendsOnlyWhatIsMissing) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto x = distribute_tensor(counting_values({4, 4}), rank.mesh({4}, {"x"}), {Shard{0}});
    const CommunicationScope communication(mesh);
    x.redistribute(mesh, {Shard{0}, Shard{1}});
    // A rank keeps half of its row of 4 and sends half to the other rank of its pair.
    EXPECT_EQ(communication.total().calls, 1);
    EXPECT_EQ(communication.total().bytes, 2 * 8);
  });
}

TEST(CrossMeshRedistribute, CarriesGradientsBack) {
  auto plain = counting_values({7, 5}).requires_grad_();
  plain.mul(counting_values({7, 5})).pow(2).sum().backward();
  RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& flat) {
    const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
    const auto leaf =
        distribute_tensor(counting_values({7, 5}), flat, {Shard{0}}).tensor().detach();
    leaf.requires_grad_();
    const at::Tensor other = distribute_tensor(counting_values({7, 5}), mesh, {Shard{1}, Shard{0}});
    const auto moved = DistributedTensor(leaf).redistribute(mesh, {Shard{1}, Shard{0}});
    moved.tensor().mul(other).pow(2).sum().backward();
    EXPECT_EQ(DistributedTensor(leaf.grad()).mesh(), flat);
    EXPECT_TRUE(at::allclose(DistributedTensor(leaf.grad()).full_tensor(), plain.grad()));
  });
}

TEST(CrossMeshRedistribute, MovesComplexNumbersAndBools) {
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& flat) {
    const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
    const auto complex = at::complex(counting_values({5, 3}), counting_values({5, 3}).cos());
    const auto x = distribute_tensor(complex, flat, {Shard{0}});
    EXPECT_TRUE(at::equal(x.redistribute(mesh, {Shard{1}, Shard{0}}).full_tensor(), complex));
    const auto bools = counting_values({5, 3}).gt(4);
    const auto y = distribute_tensor(bools, mesh, {Shard{1}, Shard{0}});
    EXPECT_TRUE(at::equal(y.redistribute(flat, {Shard{0}}).full_tensor(), bools));
  });
}

TEST(CrossMeshRedistribute, RefusesAMeshOfOtherRanks) {
  RunRanks(4, [](Rank& rank) {
    const DeviceMesh pair(rank.world(), {0, 3}, MeshShape({2}, {"pair"}));
    const auto x = distribute_tensor(counting_values({4}), rank.mesh({2, 2}, {"dp", "tp"}),
                                     {Shard{0}, Replicate{}});
    EXPECT_ERROR(x.redistribute(pair, {Shard{0}}), "dp=2, tp=2", "pair=2");
    EXPECT_TRUE(at::equal(x.full_tensor(), counting_values({4})));
  });
}

TEST(CrossMeshRedistribute, OperatorsNameBothMeshesAndTheRemedy) {
  RunRanks(4, [](Rank& rank) {
    const at::Tensor a = distribute_tensor(counting_values({4}), rank.mesh({4}, {"x"}), {Shard{0}});
    const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
    const at::Tensor b = distribute_tensor(counting_values({4}), mesh, {Shard{0}, Replicate{}});
    EXPECT_ERROR(at::add(a, b), "aten::add", "x=4", "dp=2, tp=2", "redistribute(");
    const at::Tensor moved = DistributedTensor(a).redistribute(mesh, {Shard{0}, Replicate{}});
    EXPECT_TRUE(
        at::equal(DistributedTensor(at::add(moved, b)).full_tensor(), counting_values({4}) * 2));
  });
}

TEST(Scatter, SpreadsTheValuesOfOneRank) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto& placements : square()) {
      const auto own =
          rank.rank() == 2 ? counting_values({7, 5}) : at::full({7, 5}, -1.0, at::kDouble);
      const auto x = distribute_tensor(own, mesh, placements, {.source = 2});
      EXPECT_EQ(x.placements(), placements);
      EXPECT_TRUE(at::equal(x.full_tensor(), counting_values({7, 5}))) << to_string(placements);
    }
    EXPECT_ERROR(distribute_tensor(counting_values({2}), mesh, square()[0], {.source = 4}),
                 "distribute_tensor from 4 of");
  });
}

}  // namespace
}  // namespace tessera
