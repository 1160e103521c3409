#include "tessera/mesh/device_mesh.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using Coordinate = std::vector<std::int64_t>;

DeviceMesh fake_mesh(int rank, std::vector<std::int64_t> sizes, std::vector<std::string> names) {
  const int size = static_cast<int>(MeshShape(sizes).numel());
  return init_device_mesh(comm::fake_world(rank, size), std::move(sizes), std::move(names));
}

class GpuWorld final : public comm::World {
 public:
  int rank() const override { return 3; }
  int size() const override { return 4; }
  int local_rank() const override { return 3; }
  int device_index() const override { return 3; }
  const comm::WorldOptions& options() const override { return options_; }
  comm::TrafficCounter& traffic() override { return traffic_; }
  comm::CommunicatorPtr group(const std::vector<int>&, const std::string&) override {
    fail("there is no GPU");
  }

 private:
  comm::WorldOptions options_{.device = "cuda", .backend = "nccl"};
  comm::TrafficCounter traffic_;
};

// The mesh's device must have an index: on other threads, "cuda" without an index can mean GPU 0.
TEST(DeviceMesh, HasTheGpuOfItsRank) {
  const DeviceMesh mesh = init_device_mesh(std::make_shared<GpuWorld>(), {4}, {"dp"});
  EXPECT_EQ(mesh.device(), c10::Device(c10::kCUDA, 3));
  EXPECT_EQ(fake_mesh(0, {4}, {"dp"}).device(), c10::Device(c10::kCPU));
}

TEST(DeviceMesh, OrdersRanksRowMajor) {
  const DeviceMesh mesh = fake_mesh(5, {2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.coordinate(), (Coordinate{1, 2}));
  EXPECT_EQ(mesh.local_rank("dp"), 1);
  EXPECT_EQ(mesh.local_rank("tp"), 2);
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.size("tp"), 3);
}

TEST(DeviceMesh, SliceContainsTheCurrentRank) {
  const DeviceMesh mesh = fake_mesh(4, {2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh["tp"].ranks(), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(mesh["dp"].ranks(), (std::vector<int>{1, 4}));
  EXPECT_EQ(mesh["dp"].local_rank(), 1);
}

TEST(DeviceMesh, SliceOfTwoDimensionsOfThree) {
  const DeviceMesh mesh = fake_mesh(9, {2, 2, 3}, {"pp", "dp", "tp"});
  const DeviceMesh sub = mesh[{"pp", "tp"}];
  EXPECT_EQ(sub.ranks(), (std::vector<int>{3, 4, 5, 9, 10, 11}));
  EXPECT_EQ(sub.coordinate(), (Coordinate{1, 0}));
}

TEST(DeviceMesh, EqualSlicesAreOneObject) {
  const DeviceMesh mesh = fake_mesh(3, {2, 2, 2}, {"pp", "dp", "tp"});
  EXPECT_EQ(mesh["tp"].id(), mesh["tp"].id());
  const DeviceMesh pair = mesh[{"dp", "tp"}];
  EXPECT_EQ(pair["tp"], mesh["tp"]);
  EXPECT_EQ(mesh.slice({"pp", "dp", "tp"}), mesh);
  EXPECT_EQ(mesh["tp"].root(), mesh);
}

TEST(DeviceMesh, FlattenJoinsDimensionsAndIsFoundByName) {
  const DeviceMesh mesh = fake_mesh(6, {2, 2, 2}, {"dp", "cp", "tp"});
  const DeviceMesh pair = mesh[{"dp", "cp"}];
  const DeviceMesh flat = pair.flatten();
  EXPECT_EQ(flat.shape(), MeshShape({4}, {"dp_cp"}));
  EXPECT_EQ(flat.ranks(), (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(flat.local_rank(), 3);
  EXPECT_EQ(mesh["dp_cp"], flat);
  EXPECT_EQ(pair.flatten(), flat);
}

TEST(DeviceMesh, FlattensAFlattenedDimension) {
  const DeviceMesh mesh = fake_mesh(6, {2, 2, 2, 2}, {"replicate", "dp", "cp", "tp"});
  mesh[{"dp", "cp"}].flatten();
  const DeviceMesh all = mesh[{"replicate", "dp_cp"}].flatten();
  EXPECT_EQ(all, (mesh[{"replicate", "dp", "cp"}].flatten()));
  EXPECT_EQ(mesh["replicate_dp_cp"], all);
  EXPECT_EQ(mesh.size("replicate_dp_cp"), 8);
  EXPECT_ERROR((mesh[{"dp_cp", "tp"}].flatten("replicate_dp_cp")),
               "already stands for the dimensions replicate, dp, cp");
}

TEST_ON_MESH(DeviceMesh, AcceptsTheNameOfAFlattenedDimension, {2, 2}, {"dp", "tp"}) {
  const DeviceMesh flat = mesh.flatten("dt");
  EXPECT_EQ(mesh.size("dt"), 4);
  EXPECT_EQ(mesh.local_rank("dt"), rank.rank());
  EXPECT_EQ(&mesh.group("dt"), &flat.group());
  // "dt" is a flattened mesh dimension, made from dp and tp.
  EXPECT_ERROR(mesh["tp"].size("dt"), "mesh (tp=2) has no dimension called \"dp\"");
}

TEST(DeviceMesh, CountsNegativeDimensionsFromTheEnd) {
  const DeviceMesh mesh = fake_mesh(5, {2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.size(-1), 3);
  EXPECT_EQ(mesh.local_rank(-2), 1);
  EXPECT_EQ(&mesh.group(-1), &mesh.group("tp"));
  EXPECT_EQ(&mesh.group(std::vector<int>{-1}), &mesh.group("tp"));
  EXPECT_EQ(mesh.shape().size(-2), 2);
}

TEST(DeviceMesh, UnflattenSplitsADimension) {
  const DeviceMesh mesh = fake_mesh(7, {6, 2}, {"dp", "tp"});
  const DeviceMesh split = mesh.unflatten("dp", {2, 3}, {"replicate", "shard"});
  EXPECT_EQ(split.shape(), MeshShape({2, 3, 2}, {"replicate", "shard", "tp"}));
  EXPECT_EQ(split.coordinate(), (Coordinate{1, 0, 1}));
  EXPECT_EQ(split["shard"].ranks(), (std::vector<int>{7, 9, 11}));
  EXPECT_EQ(split.root(), mesh);
}

TEST(DeviceMesh, ConcatenateJoinsSubmeshesInTheGivenOrder) {
  const DeviceMesh mesh = fake_mesh(5, {2, 2, 2}, {"pp", "dp", "tp"});
  const DeviceMesh joined = DeviceMesh::concatenate({mesh["tp"], mesh["pp"]});
  EXPECT_EQ(joined.shape(), MeshShape({2, 2}, {"tp", "pp"}));
  EXPECT_EQ(joined.ranks(), (std::vector<int>{0, 4, 1, 5}));
  EXPECT_EQ(joined.coordinate(), (Coordinate{1, 1}));
  EXPECT_EQ(DeviceMesh::concatenate({mesh["pp"], mesh["tp"]}), (mesh[{"pp", "tp"}]));
}

TEST(DeviceMesh, EqualMeshesOfOneWorldAreOneObject) {
  const comm::WorldPtr world = comm::fake_world(1, 4);
  const DeviceMesh one = init_device_mesh(world, {2, 2}, {"dp", "tp"});
  const DeviceMesh two(world, {0, 1, 2, 3}, MeshShape({2, 2}, {"dp", "tp"}));
  EXPECT_EQ(one, two);
  EXPECT_EQ(std::hash<DeviceMesh>()(one), std::hash<DeviceMesh>()(two));
  EXPECT_EQ(one["tp"], two["tp"]);
  EXPECT_NE(one, init_device_mesh(world, {2, 2}, {"dp", "cp"}));
  EXPECT_NE(one, init_device_mesh(comm::fake_world(1, 4), {2, 2}, {"dp", "tp"}));
}

TEST(DeviceMesh, RefusesInvalidCalls) {
  const DeviceMesh mesh = fake_mesh(5, {2, 3}, {"dp", "tp"});
  for (const int dim : {2, 5, -3}) {
    EXPECT_ERROR(mesh.size(dim), "has no dimension " + std::to_string(dim));
    EXPECT_ERROR(mesh.shape().size(dim), "has no dimension " + std::to_string(dim));
    EXPECT_ERROR(mesh.local_rank(dim), "has no dimension " + std::to_string(dim));
    EXPECT_ERROR(mesh.group(dim), "has no dimension " + std::to_string(dim));
    EXPECT_ERROR(mesh.group(std::vector<int>{dim}), "has no dimension " + std::to_string(dim));
  }
  EXPECT_ERROR(mesh["cp"], "has no dimension called \"cp\"");
  EXPECT_ERROR((mesh[{"dp", "dp"}]), "slice [dp, dp] repeats");
  EXPECT_ERROR((mesh[{"tp", "dp"}]), "slice [tp, dp] repeats");
  EXPECT_ERROR(mesh.unflatten("tp", {2, 2}, {"a", "b"}), "the sizes multiply to 4, not 3");
  EXPECT_ERROR(mesh.unflatten("tp", {1, 3}, {"a", "dp"}), "\"dp\"");
  const DeviceMesh cube = fake_mesh(0, {2, 2, 2}, {"dp", "cp", "tp"});
  EXPECT_ERROR((cube[{"dp", "cp"}].flatten("tp")), "'tp' is a dimension of the root mesh");
  cube[{"dp", "cp"}].flatten("x");
  EXPECT_ERROR((cube[{"cp", "tp"}].flatten("x")), "'x' already stands for the dimensions");
  const DeviceMesh overlap = cube[{"cp", "tp"}].flatten(), stranger = fake_mesh(0, {2}, {"ep"});
  EXPECT_ERROR(DeviceMesh::concatenate({cube["tp"], overlap}), "share a dimension");
  EXPECT_ERROR(DeviceMesh::concatenate({}), "no meshes were passed");
  EXPECT_ERROR(DeviceMesh::concatenate({cube["tp"], stranger}), "come from different meshes");
  EXPECT_ERROR(init_device_mesh(comm::fake_world(0, 4), {2, 3}, {"dp", "tp"}),
               "the sizes multiply to 6, but the world has 4 ranks");
  EXPECT_ERROR(DeviceMesh(comm::fake_world(0, 4), {0, 1, 1, 2}, MeshShape({4})),
               "a rank is repeated or outside the world of 4");
  EXPECT_ERROR(DeviceMesh(comm::fake_world(0, 4), {0, 4}, MeshShape({2})),
               "a rank is repeated or outside the world of 4");
}

TEST(DeviceMesh, NonMemberHasNoCoordinateAndNoGroup) {
  const DeviceMesh mesh(comm::fake_world(3, 4), {0, 1}, MeshShape({2}, {"tp"}));
  EXPECT_TRUE(mesh.coordinate().empty());
  EXPECT_FALSE(mesh.contains_this_rank());
  EXPECT_ERROR(mesh.local_rank(), "rank 3 is not a member");
  EXPECT_ERROR(mesh.group(), "rank 3 is not a member");
}

TEST(DeviceMesh, EmptyHandleThrows) {
  EXPECT_ERROR(DeviceMesh().ndim(), "used before a mesh was assigned");
  EXPECT_EQ(to_string(DeviceMesh()), "DeviceMesh()");
}

TEST_ON_MESH(DeviceMesh, GroupsReduceOverTheirDimensionOnly, {2, 2}, {"dp", "tp"}) {
  const at::Tensor over_tp = at::full({1}, 1 << rank.rank(), at::kLong);
  const at::Tensor over_dp = over_tp.clone();
  mesh.group("tp").all_reduce(over_tp, ReduceOp::kSum)->wait();
  mesh.group("dp").all_reduce(over_dp, ReduceOp::kSum)->wait();
  EXPECT_EQ(over_tp.item<std::int64_t>(), rank.rank() < 2 ? 0b0011 : 0b1100);
  EXPECT_EQ(over_dp.item<std::int64_t>(), rank.rank() % 2 == 0 ? 0b0101 : 0b1010);
}

TEST_ON_MESH(DeviceMesh, GroupOfTwoDimensionsFollowsTheGivenOrder, {2, 2}, {"dp", "tp"}) {
  EXPECT_EQ(mesh.group(std::vector<int>{0, 1}).rank(), rank.rank());
  EXPECT_EQ(mesh.group(std::vector<int>{1, 0}).rank(), rank.rank() % 2 * 2 + rank.rank() / 2);
}

comm::CommunicatorPtr row_of(const Rank& rank) {
  const int first = rank.rank() / 2 * 2;
  return rank.world()->group({first, first + 1}, "rows");
}

comm::CommunicatorPtr column_of(const Rank& rank) {
  return rank.world()->group({rank.rank() % 2, rank.rank() % 2 + 2}, "columns");
}

TEST_ON_RANKS(DeviceMeshFromGroups, UsesTheGivenGroups, 4) {
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
  EXPECT_ERROR(make({row_of(rank)}), "one group for each mesh dimension");
  EXPECT_ERROR(make({column_of(rank), nullptr}), "2 ranks");
  const auto all = rank.world()->group({0, 1, 2, 3}, "all");
  EXPECT_ERROR(make({column_of(rank), all}), "2 ranks");
}

}  // namespace
}  // namespace tessera
