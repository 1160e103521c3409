// What from_local and its kin take: the global sizes of a tensor that each rank has a part of,
// where they were not given, and what must be given.

#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/local_map.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

/// This rank's part of `whole`, made anew from its local tensor alone.
DistributedTensor from_part(const at::Tensor& whole, const DeviceMesh& mesh,
                            const Placements& placements) {
  const at::Tensor part = distribute_tensor(whole, mesh, placements).to_local();
  return DistributedTensor::from_local(part, mesh, placements);
}

TEST(FromLocal, FindsTheSizesOfUnevenShards) {
  for (const int ranks : {1, 2, 3, 4}) {
    RunOnMesh({ranks}, {"x"}, [](const DeviceMesh& mesh) {
      for (const std::int64_t rows : {0, 1, 2, 5, 6}) {
        const at::Tensor whole = values({rows, 3});
        EXPECT_TRUE(at::equal(from_part(whole, mesh, {Shard{0}}).full_tensor(), whole));
        EXPECT_TRUE(at::equal(from_part(whole.t(), mesh, {Shard{-1}}).full_tensor(), whole.t()));
      }
    });
  }
}

TEST(FromLocal, FindsThemOnAMeshOfTwoDimensions) {
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = values({5, 3});
    for (const Placements& placements :
         {Placements{Shard{0}, Shard{0}}, Placements{Shard{1}, Shard{0}},
          Placements{Replicate{}, Shard{0}}, Placements{Shard{0}, Replicate{}}}) {
      EXPECT_TRUE(at::equal(from_part(whole, mesh, placements).full_tensor(), whole))
          << to_string(placements);
    }
  });
}

TEST(FromLocal, RefusesOnEveryRankPartsThatAreNoChunks) {
  const auto errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    DistributedTensor::from_local(at::zeros({rank.rank() == 1 ? 3 : 2}), rank.mesh({3}, {"x"}),
                                  {Shard{0}});
  });
  for (const std::string& error : errors) {
    EXPECT_CONTAINS(error, "from_local takes a plain tensor for [Shard(0)]",
                    "hold [2, 3, 2] positions along dimension 0",
                    "torch.chunk of 7 is [3, 3, 1]; split it so");
  }
}

TEST(FromLocal, RefusesOnEveryRankPartsOfOtherTensors) {
  RunOnMesh({3}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    const bool other = rank.rank() == 1;
    const auto expect_refused = [&](const at::Tensor& part) {
      EXPECT_ERROR(DistributedTensor::from_local(part, mesh, {Shard{0}}),
                   "from_local takes a plain tensor for [Shard(0)], but that of rank 1 has another "
                   "type than that of rank 0, or other sizes");
    };
    expect_refused(at::zeros({2, other ? 4 : 3}));
    expect_refused(other ? at::zeros({2}) : at::zeros({2, 3}));
    expect_refused(at::zeros({2, 3}, other ? at::kDouble : at::kFloat));
  });
}

TEST(LocalMap, FindsTheSizesOfUnevenResults) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = values({5, 3});
    const auto found =
        local_map([](const std::vector<at::Tensor>& x) { return std::vector{x[0].square()}; },
                  {distribute_tensor(whole, mesh, {Shard{0}}).tensor()}, mesh, {{Shard{0}}});
    EXPECT_TRUE(at::equal(DistributedTensor(found[0]).full_tensor(), whole.square()));
  });
}

TEST(FromLocal, NamesWhatIsMissing) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const Placements rows{Shard{0}};
    const std::vector<std::int64_t> sizes{4};
    EXPECT_ERROR(DistributedTensor::from_local({}, mesh, rows), "from_local of an undefined");
    EXPECT_ERROR(DistributedTensor::from_local({}, mesh, rows, sizes),
                 "from_local of an undefined");
    EXPECT_ERROR(DistributedTensor::from_local(values({2}), ShardingSpec{mesh, nullptr}, sizes),
                 "from_local: the spec has no layout");
    EXPECT_ERROR(distribute_tensor({}, mesh, rows), "distribute_tensor of an undefined");
    EXPECT_ERROR(distribute_tensor({}, mesh, rows, {.source = 0}),
                 "distribute_tensor of an undefined");
    const DistributedTensor made = distribute_tensor(values({4}), mesh, rows);
    EXPECT_ERROR(distribute_tensor(made, mesh, rows, {.source = 0}), "is distributed already");
    EXPECT_ERROR(made.redistribute(LayoutPtr()), "redistribute to no layout");
    EXPECT_ERROR(check_agreement(DistributedTensor()), "found an undefined one");
    EXPECT_ERROR(zeros({-4, 2}, mesh, rows), "of sizes [-4, 2] cannot be");
  });
}

TEST(LocalMap, NamesWhatIsMissing) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    using Tensors = std::vector<at::Tensor>;
    const Placements whole{Replicate{}};
    const Tensors two{values({4}), values({4})};
    const auto same = [](const Tensors& tensors) { return tensors; };
    const auto none = [](const Tensors&) { return Tensors(2); };
    EXPECT_ERROR(local_map({}, two, mesh, {whole, whole}), "local_map was given no function");
    EXPECT_ERROR(local_map(none, two, mesh, {whole, whole}), "result 0 of the function");
    EXPECT_ERROR(local_map(same, two, mesh, {whole, whole}, {.in_placements = {whole}}),
                 "in_placements has 1 items for 2 arguments");
    EXPECT_ERROR(local_map(same, two, mesh, {whole, whole}, {.in_grad_placements = {whole}}),
                 "in_grad_placements has 1 items for 2 arguments");
    EXPECT_ERROR(local_map(same, two, mesh, {whole, whole}, {.out_sizes = {{4}}}),
                 "out_sizes has 1 items for 2 lists of out_placements");
  });
}

}  // namespace
}  // namespace tessera
