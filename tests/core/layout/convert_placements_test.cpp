#include <gtest/gtest.h>

#include <algorithm>

#include "oracle.h"
#include "tessera/core/error.h"
#include "tessera/core/layout.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::coordinates;
using testing::Indices;
using testing::layout_indices;
using testing::torch_indices;

LayoutPtr order(const Indices& mesh, std::vector<int> mesh_dims) {
  return Layout::intern(mesh, {{{0, std::move(mesh_dims)}}});
}

bool owns_as_torch(const Layout& layout, const Placements& placements, const Indices& sizes) {
  for (const auto& at : coordinates(layout.mesh_sizes())) {
    for (int d = 0; d < layout.tensor_ndim(); ++d) {
      const auto size = sizes[static_cast<std::size_t>(d)];
      if (layout_indices(layout, d, size, at) !=
          torch_indices(placements, layout.mesh_sizes(), d, size, at)) {
        return false;
      }
    }
  }
  return true;
}

TEST(ToLayout, LaterMeshDimensionsSplitWhatEarlierLeft) {
  EXPECT_EQ(to_layout({2, 2}, {Shard{0}, Shard{0}}, Indices{8}), order({2, 2}, {0, 1}));
}

TEST(ToLayout, FsdpOverTensorParallelIsAnOrder) {
  EXPECT_EQ(to_layout({2, 4}, {StridedShard{0, 4}, Shard{0}}, Indices{16}), order({2, 4}, {1, 0}));
  EXPECT_EQ(to_layout({2, 4}, {StridedShard{0, 4}, Shard{0}}, Indices{7}), order({2, 4}, {1, 0}));
}

TEST(ToLayout, AStridedShardAloneHasALocalDigitInFront) {
  EXPECT_EQ(to_layout({2}, {StridedShard{0, 3}}, Indices{12}),
            Layout::intern({2}, {{{3, {}}, {4, {0}}}}));
}

TEST(ToLayout, CountsNegativeDimensionsFromTheEnd) {
  EXPECT_EQ(to_layout({2}, {Shard{-1}}, Indices{4, 4}), to_layout({2}, {Shard{1}}, Indices{4, 4}));
}

TEST(ToLayout, RefusesWhatDoesNotFit) {
  EXPECT_ERROR(to_layout({2}, {Shard{1}}, Indices{4}),
               "shard dimension 1 of a tensor with 1 dimensions");
  EXPECT_ERROR(to_layout({2}, {Shard{-2}}, Indices{4}),
               "shard dimension -2 of a tensor with 1 dimensions");
  EXPECT_ERROR(to_layout({2}, {Shard{0}}, Indices{}),
               "shard dimension 0 of a tensor with 0 dimensions");
  EXPECT_ERROR(to_layout({2, 2}, {Shard{0}}, Indices{4}), "are 1 for a mesh of 2 dimensions");
  EXPECT_ERROR(to_layout({2}, {StridedShard{0, 3}}, Indices{8}), "don't line up");
  EXPECT_ERROR(to_layout({2, 3}, {StridedShard{0, 2}, Shard{0}}, Indices{12}), "don't line up");
  EXPECT_ERROR(to_layout({2}, {StridedShard{0, 0}}, Indices{8}), "split factor below 1");
}

/// Lists of Shard(0), strided shards with factors up to 6 and Replicate on `mesh`, of a dimension
/// that all of it divides: what converts owns what PyTorch's semantics give, and comes back as a
/// list that means the same.
void check_all_even_lists(const Indices& mesh) {
  std::int64_t size = 60;  // all split factors up to 6 divide it
  for (const auto m : mesh) {
    size *= m;
  }
  const auto length = static_cast<int>(mesh.size());
  int converted = 0;
  for (const auto& list : testing::all_lists(length, 7)) {
    Placements placements;
    for (const int v : list) {
      if (v == 0) {
        placements.emplace_back(Replicate{});
      }
      if (v == 1) {
        placements.emplace_back(Shard{0});
      }
      if (v > 1) {
        placements.emplace_back(StridedShard{0, v});
      }
    }
    LayoutPtr layout = nullptr;
    try {
      layout = to_layout(mesh, placements, Indices{size});
    } catch (const Error&) {
      continue;
    }
    ++converted;
    ASSERT_TRUE(owns_as_torch(*layout, placements, {size})) << to_string(placements);
    const auto back = to_placements(*layout, Indices{size});
    EXPECT_EQ(to_layout(mesh, back, Indices{size}), layout) << to_string(placements);
    EXPECT_TRUE(owns_as_torch(*layout, back, {size})) << to_string(back);
  }
  EXPECT_GE(converted, 7);
}

TEST(ToLayout, OwnsWhatTorchSaysForAllEvenListsOn2) {
  check_all_even_lists({2});
}
TEST(ToLayout, OwnsWhatTorchSaysForAllEvenListsOn2x2) {
  check_all_even_lists({2, 2});
}
TEST(ToLayout, OwnsWhatTorchSaysForAllEvenListsOn2x3) {
  check_all_even_lists({2, 3});
}
TEST(ToLayout, OwnsWhatTorchSaysForAllEvenListsOn4x2) {
  check_all_even_lists({4, 2});
}
TEST(ToLayout, OwnsWhatTorchSaysForAllEvenListsOn2x2x2) {
  check_all_even_lists({2, 2, 2});
}

TEST(ToLayout, OwnsWhatTorchSaysForPlainShardsOfAnySize) {
  for (const Indices& mesh : {Indices{2, 2}, Indices{3, 2}, Indices{2, 4}}) {
    for (std::int64_t size = 0; size < 24; ++size) {
      for (const auto& list : testing::all_lists(2, 3)) {
        Placements placements;
        for (const int v : list) {
          placements.push_back(v == 2 ? Placement(Replicate{}) : Placement(Shard{v}));
        }
        const Indices sizes{size, 5};
        const auto layout = to_layout(mesh, placements, sizes);
        EXPECT_TRUE(owns_as_torch(*layout, placements, sizes)) << size << to_string(placements);
        EXPECT_EQ(to_placements(*layout, sizes), placements);
      }
    }
  }
}

/// Sizes that the mesh doesn't divide: PyTorch's FSDP cuts the tensor-parallel shard, so the order
/// tp, dp of nested chunks is what its parameters own.
TEST(ToLayout, FsdpOverTensorParallelNestsChunksOfAnySize) {
  for (std::int64_t size = 0; size < 24; ++size) {
    const Indices mesh{2, 3};
    const Placements placements{StridedShard{0, 3}, Shard{0}};
    const auto layout = to_layout(mesh, placements, Indices{size});
    Indices all;
    for (std::int64_t i = 0; i < size; ++i) {
      all.push_back(i);
    }
    for (const auto& at : coordinates(mesh)) {
      const auto tp = testing::chunk(all, 3, at[1]);
      EXPECT_EQ(layout_indices(*layout, 0, size, at), testing::chunk(tp, 2, at[0])) << size;
    }
    EXPECT_EQ(to_placements(*layout, Indices{size}), placements);
  }
}

TEST(ToPlacements, PrintsEveryOrderOfThreeMeshDimensions) {
  const Indices mesh{2, 3, 4};
  const Indices size{48};
  std::vector<int> mesh_dims{0, 1, 2};
  do {
    const auto layout = order(mesh, mesh_dims);
    const auto placements = to_placements(*layout, size);
    EXPECT_EQ(to_layout(mesh, placements, size), layout);
    EXPECT_TRUE(owns_as_torch(*layout, placements, size)) << to_string(placements);
  } while (std::next_permutation(mesh_dims.begin(), mesh_dims.end()));
}

TEST(ToPlacements, SaysPartialAndReplicate) {
  const auto layout = Layout::intern({2, 2, 2}, {{{0, {2}}}}, {{0, ReduceOp::kAvg}});
  EXPECT_EQ(to_placements(*layout, Indices{4}),
            (Placements{Partial{ReduceOp::kAvg}, Replicate{}, Shard{0}}));
}

TEST(ToPlacements, MeshDimensionsOfSizeOneKeepTheirShard) {
  const Placements placements{Shard{0}, Shard{0}};
  const Indices size{6};
  EXPECT_EQ(to_placements(*to_layout({1, 2}, placements, size), size), placements);
}

TEST(ToPlacements, RefusesDigitsThatNoListCanSay) {
  const auto layout = Layout::intern({2}, {{{5, {0}}, {4, {}}}});
  EXPECT_ERROR(to_placements(*layout, Indices{20}), "has no form as a list of placements");
}

}  // namespace
}  // namespace tessera
