#include "tessera/core/mesh_shape.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera {
namespace {

TEST(MeshShape, NumbersPositionsRowMajor) {
  const MeshShape mesh({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.numel(), 6);
  EXPECT_EQ(mesh.coordinate(4), (std::vector<std::int64_t>{1, 1}));
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(mesh.index(mesh.coordinate(i)), i);
  }
}

TEST(MeshShape, FindsDimensionsByName) {
  const MeshShape mesh({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.dim("tp"), 1);
  EXPECT_ERROR(mesh.dim("pp"), "has no dimension called \"pp\"");
}

TEST(MeshShape, HasOnePositionWithoutDimensions) {
  EXPECT_EQ(MeshShape().numel(), 1);
  EXPECT_TRUE(MeshShape().coordinate(0).empty());
}

TEST(MeshShape, Prints) {
  EXPECT_EQ(to_string(MeshShape({2, 2}, {"dp", "tp"})), "(dp=2, tp=2)");
  EXPECT_EQ(to_string(MeshShape({2, 2})), "(2, 2)");
  EXPECT_EQ(detail::concat(MeshShape({2, 2})), "(2, 2)");
}

TEST(MeshShape, RefusesWhatIsNoMesh) {
  EXPECT_ERROR(MeshShape({2, 0}), "has a dimension of size 0");
  EXPECT_ERROR(MeshShape({2, 2}, {"dp"}), "mesh of 2 dimensions was given 1 names");
  EXPECT_ERROR(MeshShape({2, 2}, {"dp", "dp"}), "two mesh dimensions are called \"dp\"");
  EXPECT_ERROR(MeshShape({2, 2}, {"dp", ""}), "has an empty name");
}

TEST(MeshShape, RefusesPositionsOutside) {
  const MeshShape mesh({2, 3});
  EXPECT_ERROR(mesh.coordinate(6), "position 6 is outside");
  EXPECT_ERROR(mesh.coordinate(-1), "position -1 is outside");
  EXPECT_ERROR(mesh.index({0, 3}), "coordinate 3 is outside");
  EXPECT_ERROR(mesh.index({0}), "a coordinate of 1 numbers");
}

}  // namespace
}  // namespace tessera
