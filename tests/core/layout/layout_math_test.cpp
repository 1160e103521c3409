#include "tessera/core/layout_math.h"

#include <gtest/gtest.h>

#include "oracle.h"
#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::coordinates;
using testing::Indices;
using testing::layout_indices;

struct Case {
  Indices mesh;
  Layout::Dims dims;
  Indices sizes;
};

/// Even, uneven, empty, nested both ways round, strided, two dimensions, size 0 and 1.
std::vector<Case> cases() {
  return {
      {{4}, {{{0, {0}}}}, {8}},
      {{4}, {{{0, {0}}}}, {6}},
      {{4}, {{{0, {0}}}}, {1}},
      {{4}, {{{0, {0}}}}, {0}},
      {{4}, {{}}, {5}},
      {{2, 2}, {{{0, {0, 1}}}}, {7}},
      {{2, 2}, {{{0, {1, 0}}}}, {5}},
      {{2, 4}, {{{0, {1, 0}}}}, {3}},
      {{2, 3}, {{{0, {0}}}, {{0, {1}}}}, {5, 7}},
      {{2, 3}, {{}, {{0, {1, 0}}}, {}}, {2, 11, 3}},
      {{2}, {{{3, {}}, {5, {0}}}}, {15}},
      {{2}, {{{5, {0}}, {4, {}}}}, {20}},
      {{2, 2}, {{{3, {0}}, {2, {}}, {5, {1}}}}, {30}},
      {{2, 3}, {{{2, {}}, {7, {1}}}, {{0, {0}}}}, {14, 3}},
  };
}

LayoutPtr layout_of(const Case& c) {
  return Layout::intern(c.mesh, c.dims);
}

TEST(LayoutMath, ChunksAsTorchDoes) {
  for (std::int64_t size = 0; size < 14; ++size) {
    for (std::int64_t parts = 1; parts < 6; ++parts) {
      Indices list;
      for (std::int64_t i = 0; i < size; ++i) {
        list.push_back(i);
      }
      for (std::int64_t index = 0; index < parts; ++index) {
        const auto piece = testing::chunk(list, parts, index);
        EXPECT_EQ(chunk_size(size, parts, index), static_cast<std::int64_t>(piece.size()));
        EXPECT_EQ(chunk_offset(size, parts, index), piece.empty() ? size : piece.front());
      }
    }
  }
}

/// Why a flattened group stands in for two mesh dimensions only where they divide.
TEST(LayoutMath, NestedChunksOf2x2DifferFromChunksOf4ForMostUnevenSizes) {
  int differ = 0;
  const auto nested = Layout::intern({2, 2}, {{{0, {0, 1}}}});
  const auto flat = Layout::intern({4}, {{{0, {0}}}});
  for (std::int64_t size = 1; size <= 64; ++size) {
    bool same = true;
    for (std::int64_t i = 0; i < 4; ++i) {
      same = same && global_indices(*nested, 0, size, Indices{i / 2, i % 2}) ==
                         global_indices(*flat, 0, size, Indices{i});
    }
    differ += same ? 0 : 1;
    EXPECT_TRUE(same || size % 4 != 0);
  }
  EXPECT_EQ(differ, 31);
}

TEST(LayoutMath, LocalSizesCountTheOwnedIndices) {
  for (const auto& c : cases()) {
    const auto layout = layout_of(c);
    for (const auto& at : coordinates(c.mesh)) {
      const auto sizes = local_sizes(*layout, c.sizes, at);
      std::int64_t numel = 1;
      for (int d = 0; d < layout->tensor_ndim(); ++d) {
        const auto i = static_cast<std::size_t>(d);
        const auto owned = layout_indices(*layout, d, c.sizes[i], at);
        EXPECT_EQ(sizes[i], static_cast<std::int64_t>(owned.size())) << to_string(*layout);
        EXPECT_EQ(local_size(*layout, d, c.sizes[i], at), sizes[i]);
        numel *= sizes[i];
      }
      EXPECT_EQ(local_numel(*layout, c.sizes, at), numel);
    }
  }
}

TEST(LayoutMath, GlobalIndicesAreTheOwnedOnesInOrder) {
  for (const auto& c : cases()) {
    const auto layout = layout_of(c);
    for (const auto& at : coordinates(c.mesh)) {
      for (int d = 0; d < layout->tensor_ndim(); ++d) {
        const auto size = c.sizes[static_cast<std::size_t>(d)];
        EXPECT_EQ(global_indices(*layout, d, size, at), layout_indices(*layout, d, size, at))
            << to_string(*layout);
      }
    }
  }
}

/// Every element of every box is where global_indices says, and the boxes hold all elements.
TEST(LayoutMath, BoxesCoverTheLocalTensorOnce) {
  for (const auto& c : cases()) {
    const auto layout = layout_of(c);
    for (const auto& at : coordinates(c.mesh)) {
      std::int64_t covered = 0;
      for (const auto& box : owned_boxes(*layout, c.sizes, at)) {
        std::int64_t numel = 1;
        for (std::size_t d = 0; d < c.sizes.size(); ++d) {
          const auto owned = layout_indices(*layout, static_cast<int>(d), c.sizes[d], at);
          ASSERT_GT(box.sizes[d], 0);
          for (std::int64_t i = 0; i < box.sizes[d]; ++i) {
            EXPECT_EQ(owned.at(static_cast<std::size_t>(box.local_offset[d] + i)),
                      box.global_offset[d] + i);
          }
          numel *= box.sizes[d];
        }
        covered += numel;
      }
      EXPECT_EQ(covered, local_numel(*layout, c.sizes, at)) << to_string(*layout);
    }
  }
}

TEST(LayoutMath, OneShardedDimensionIsOneBox) {
  const auto layout = Layout::intern({2, 2}, {{{0, {1, 0}}}, {}});
  const auto boxes = owned_boxes(*layout, Indices{7, 3}, Indices{1, 0});
  EXPECT_EQ(boxes, (std::vector<Box>{{{2, 0}, {0, 0}, {2, 3}}}));
}

TEST(LayoutMath, ALocalDigitInFrontIsABoxEach) {
  const auto layout = Layout::intern({2}, {{{3, {}}, {4, {0}}}});
  const auto boxes = owned_boxes(*layout, Indices{12}, Indices{1});
  EXPECT_EQ(boxes, (std::vector<Box>{{{2}, {0}, {2}}, {{6}, {2}, {2}}, {{10}, {4}, {2}}}));
}

TEST(LayoutMath, AScalarIsOneBox) {
  const auto boxes = owned_boxes(*Layout::replicated({2}, 0), Indices{}, Indices{1});
  EXPECT_EQ(boxes.size(), 1U);
}

TEST(LayoutMath, AnEmptyShardHasNoBox) {
  const auto layout = Layout::intern({4}, {{{0, {0}}}, {}});
  EXPECT_TRUE(owned_boxes(*layout, Indices{3, 5}, Indices{3}).empty());
  EXPECT_EQ(local_sizes(*layout, Indices{3, 5}, Indices{3}), (Indices{0, 5}));
}

TEST(FlatPlace, ReadsWhatItWrites) {
  const auto layout = Layout::intern({2}, {{{3, {}}, {4, {0}}}, {}});
  const FlatPlace place{{12, 5}, owned_boxes(*layout, Indices{12, 5}, Indices{1})};
  const Indices numbers = flat_place(place);
  EXPECT_EQ(numbers.size(), 2U + 3 * 6);
  EXPECT_EQ(read_flat_place(numbers, 2), place);
  EXPECT_EQ(read_flat_place(Indices{12, 5}, 2), (FlatPlace{{12, 5}, {}}));
}

TEST(FlatPlace, RefusesListsOfAnotherLength) {
  EXPECT_ERROR(read_flat_place(Indices{12, 5, 1}, 2), "a place of 3 numbers");
  EXPECT_ERROR(read_flat_place(Indices{}, 0), "of 0 dimensions");
}

TEST(LayoutMath, RefusesArgumentsOfAnotherRank) {
  const auto layout = Layout::replicated({2}, 1);
  EXPECT_ERROR(local_sizes(*layout, Indices{1, 2}, Indices{0}), "was given sizes of 2 dimensions");
  EXPECT_ERROR(local_sizes(*layout, Indices{1}, Indices{0, 0}), "was given a coordinate of 2");
}

}  // namespace
}  // namespace tessera
