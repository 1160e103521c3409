#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/mesh/device_mesh.h"
#include "testing/errors.h"
#include "testing/test_on_ranks.h"

namespace tessera {
namespace {

comm::CommunicatorPtr row_of(const Rank& rank) {
  const int first = rank.rank() / 2 * 2;
  return rank.world()->group({first, first + 1}, "rows");
}

comm::CommunicatorPtr column_of(const Rank& rank) {
  return rank.world()->group({rank.rank() % 2, rank.rank() % 2 + 2}, "columns");
}

TEST_ON_RANKS(DeviceMeshFromGroups, UsesTheGroupsThatItIsGiven, 4) {
  const auto mesh = DeviceMesh::from_groups(
      rank.world(), {0, 1, 2, 3}, MeshShape({2, 2}, {"dp", "tp"}), {column_of(rank), row_of(rank)});
  EXPECT_EQ(&mesh.group("tp"), row_of(rank).get());
  EXPECT_EQ(&mesh.group(0), column_of(rank).get());
  const at::Tensor sum = at::full({1}, 1 << rank.rank(), at::kLong);
  mesh.group("dp").all_reduce(sum, ReduceOp::kSum)->wait();
  EXPECT_EQ(sum.item<std::int64_t>(), rank.rank() % 2 == 0 ? 0b0101 : 0b1010);
}

TEST_ON_RANKS(DeviceMeshFromGroups, RefusesGroupsThatDoNotFit, 4) {
  const auto make = [&](std::vector<comm::CommunicatorPtr> groups) {
    return DeviceMesh::from_groups(rank.world(), {0, 1, 2, 3}, MeshShape({2, 2}, {"a", "b"}),
                                   groups);
  };
  EXPECT_ERROR(make({row_of(rank)}), "one for each dimension");
  EXPECT_ERROR(make({column_of(rank), nullptr}), "2 ranks");
  const auto all = rank.world()->group({0, 1, 2, 3}, "all");
  EXPECT_ERROR(make({column_of(rank), all}), "2 ranks");
}

TEST_ON_RANKS(DeviceMeshFromGroups, RefusesAMeshThatHasOthers, 2) {
  const DeviceMesh again(rank.world(), {0, 1}, MeshShape({2}, {"x"}));
  again.group();
  const auto other = rank.world()->group({0, 1}, "other");
  EXPECT_ERROR(DeviceMesh::from_groups(rank.world(), {0, 1}, MeshShape({2}, {"x"}), {other}),
               "a group already");
}

}  // namespace
}  // namespace tessera
