// Redistribution between layouts that placements seldom say: every order of mesh dimensions on one
// tensor dimension, local digits in front, three mesh dimensions.

#include <random>

#include "testing/distributed.h"
#include "testing/layouts.h"

namespace tessera {
namespace {

using testing::local_part;
using testing::random_layout;
using Sizes = std::vector<std::int64_t>;

void check_random_pairs(const Sizes& mesh_sizes, const Sizes& sizes) {
  RunOnMesh(mesh_sizes, {}, [&](const DeviceMesh& mesh) {
    const auto whole = testing::counting_values(sizes);
    std::mt19937 engine(7);
    for (int i = 0; i < 150; ++i) {
      const auto from = random_layout(engine, mesh_sizes, sizes, /*with_partial=*/false);
      const auto to = random_layout(engine, mesh_sizes, sizes, /*with_partial=*/false);
      const auto t = DistributedTensor::from_local(local_part(whole, mesh, *from),
                                                   ShardingSpec{mesh, from}, sizes);
      const auto moved = local_tensor(t.redistribute(to));
      EXPECT_TRUE(at::equal(moved, local_part(whole, mesh, *to)))
          << to_string(*from) << " -> " << to_string(*to);
    }
  });
}

TEST(RedistributeLayouts, MovesEvenTensorsOn2x2) {
  check_random_pairs({2, 2}, {8, 4});
}
TEST(RedistributeLayouts, MovesUnevenTensorsOn2x2) {
  check_random_pairs({2, 2}, {7, 6});
}
TEST(RedistributeLayouts, MovesEvenTensorsOn2x2x2) {
  check_random_pairs({2, 2, 2}, {16, 8, 4});
}
TEST(RedistributeLayouts, MovesUnevenTensorsOn3x2) {
  check_random_pairs({3, 2}, {10, 3});
}
TEST(RedistributeLayouts, MovesTensorsWithEmptyShardsOn1x2x2) {
  check_random_pairs({1, 2, 2}, {2, 6});
}

// Shards of 8 and 4 of 12 positions: no list of placements says that.
TEST(RedistributeLayouts, ErrorsNameALayoutThatHasNoPlacements) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto layout = Layout::intern({2}, {{{3, {0}}, {4, {}}}});
    const auto whole = at::arange(12, at::kFloat);
    EXPECT_ERROR(to_placements(*layout, whole.sizes()), "has no form as a list of placements");
    EXPECT_ERROR(
        DistributedTensor::from_local(whole.slice(0, 0, 6), ShardingSpec{mesh, layout}, {12}),
        "as [3:m0 x 4]");
    const auto x = DistributedTensor::from_local(local_part(whole, mesh, *layout),
                                                 ShardingSpec{mesh, layout}, {12});
    const auto y = distribute_tensor(whole, mesh, {Shard{0}});
    {
      const StrictScope strict;
      EXPECT_ERROR(at::add(x, y), "[3:m0 x 4]");
    }
    EXPECT_TRUE(at::equal(DistributedTensor(at::add(x, y)).full_tensor(), whole + whole));
  });
}

}  // namespace
}  // namespace tessera
