#include "tessera/core/mesh_shape.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

TEST(MeshShape, NumbersPositionsRowMajor) {
  const MeshShape mesh({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.numel(), 6);
  EXPECT_EQ(mesh.coordinate(4), (std::vector<std::int64_t>{1, 1}));
  for (std::int64_t i = 0; i < 6; ++i) EXPECT_EQ(mesh.index(mesh.coordinate(i)), i);
}

TEST(MeshShape, FindsDimensionsByName) {
  const MeshShape mesh({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.dim("tp"), 1);
  EXPECT_THROW(mesh.dim("pp"), Error);
}

TEST(MeshShape, OfNoDimensionsHasOnePosition) {
  EXPECT_EQ(MeshShape().numel(), 1);
  EXPECT_TRUE(MeshShape().coordinate(0).empty());
}

TEST(MeshShape, Prints) {
  EXPECT_EQ(to_string(MeshShape({2, 2}, {"dp", "tp"})), "(dp=2, tp=2)");
  EXPECT_EQ(to_string(MeshShape({2, 2})), "(2, 2)");
}

TEST(MeshShape, RefusesWhatIsNoMesh) {
  EXPECT_THROW(MeshShape({2, 0}), Error);
  EXPECT_THROW(MeshShape({2, 2}, {"dp"}), Error);
  EXPECT_THROW(MeshShape({2, 2}, {"dp", "dp"}), Error);
  EXPECT_THROW(MeshShape({2, 2}, {"dp", ""}), Error);
}

TEST(MeshShape, RefusesPositionsOutside) {
  const MeshShape mesh({2, 3});
  EXPECT_THROW(mesh.coordinate(6), Error);
  EXPECT_THROW(mesh.coordinate(-1), Error);
  EXPECT_THROW(mesh.index({0, 3}), Error);
  EXPECT_THROW(mesh.index({0}), Error);
}

}  // namespace
}  // namespace tessera
