
#include <thread>
#include <utility>

#include "oracle.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/mesh_shape.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::coordinates;
using testing::Indices;
using testing::layout_indices;

Layout::Dims one_dim(std::vector<Digit> digits) {
  return {std::move(digits)};
}

TEST(Layout, IsOneObjectPerContent) {
  const auto a = Layout::intern({2, 2}, {{{0, {0}}}, {}}, {{1, ReduceOp::kSum}});
  EXPECT_EQ(a, Layout::intern({2, 2}, {{{0, {0}}}, {}}, {{1, ReduceOp::kSum}}));
  EXPECT_NE(a, Layout::intern({2, 2}, {{{0, {0}}}, {}}, {{1, ReduceOp::kMax}}));
  EXPECT_NE(a, Layout::intern({2, 4}, {{{0, {0}}}, {}}, {{1, ReduceOp::kSum}}));
  EXPECT_NE(a, Layout::intern({2, 2}, {{}, {{0, {0}}}}, {{1, ReduceOp::kSum}}));
}

TEST(Layout, HasOneCanonicalForm) {
  const auto interned = [](const Indices& mesh, const std::vector<Digit>& digits) {
    return Layout::intern(mesh, one_dim(digits));
  };
  EXPECT_NE(interned({2, 2}, {{0, {0, 1}}}), interned({2, 2}, {{0, {1, 0}}}));
  EXPECT_EQ(interned({2}, {{8, {0}}}), interned({2}, {{0, {0}}}));
  EXPECT_EQ(interned({2}, {{8, {}}}), Layout::replicated({2}, 1));
  EXPECT_EQ(interned({2}, {{2, {}}, {3, {}}, {4, {0}}}), interned({2}, {{6, {}}, {4, {0}}}));
  EXPECT_EQ(interned({2}, {{1, {}}, {8, {0}}, {1, {}}}), interned({2}, {{0, {0}}}));
  EXPECT_EQ(interned({2, 3}, {{2, {0}}, {9, {1}}}), interned({2, 3}, {{0, {0, 1}}}));
  EXPECT_EQ(interned({2}, {{4, {0}}, {3, {}}}), interned({2}, {{0, {0}}}));
  EXPECT_EQ(interned({2}, {{5, {0}}, {4, {}}})->digits(0).size(), 2U);
  EXPECT_EQ(Layout::intern({2, 2}, {{}}, {{1, ReduceOp::kSum}, {0, ReduceOp::kMax}}),
            Layout::intern({2, 2}, {{}}, {{0, ReduceOp::kMax}, {1, ReduceOp::kSum}}));
}

/// Returns each mesh coordinate's indices in a dimension whose size is the product of two Digits.
std::vector<testing::Indices> owned(const testing::Indices& mesh,
                                    const std::vector<Digit>& digits) {
  const auto major = Layout::intern(mesh, one_dim({digits[0]}));
  const auto minor = Layout::intern(mesh, one_dim({digits[1]}));
  std::vector<testing::Indices> out;
  for (const auto& at : coordinates(mesh)) {
    auto& mine = out.emplace_back();
    for (const auto a : layout_indices(*major, 0, digits[0].extent, at)) {
      for (const auto b : layout_indices(*minor, 0, digits[1].extent, at)) {
        mine.push_back(a * digits[1].extent + b);
      }
    }
  }
  return out;
}

std::vector<std::vector<Digit>> digit_pairs() {
  const std::vector<std::vector<int>> orders{{}, {0}, {1}, {0, 1}, {1, 0}};
  std::vector<std::vector<Digit>> out;
  for (const auto& pick : testing::all_lists(4, 6)) {
    if (pick[2] == 5 || pick[3] == 5) {
      continue;
    }
    const auto& major = orders[static_cast<std::size_t>(pick[2])];
    const auto& minor = orders[static_cast<std::size_t>(pick[3])];
    const bool twice = std::any_of(minor.begin(), minor.end(), [&](int m) {
      return std::find(major.begin(), major.end(), m) != major.end();
    });
    if (!twice) {
      out.push_back({{pick[0] + 1, major}, {pick[1] + 1, minor}});
    }
  }
  return out;
}

TEST(Layout, CanonicalFormOwnsTheSameIndices) {
  const testing::Indices mesh{2, 3};
  for (const auto& digits : digit_pairs()) {
    const auto layout = Layout::intern(mesh, one_dim(digits));
    const auto expected = owned(mesh, digits);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto size = digits[0].extent * digits[1].extent;
      EXPECT_EQ(layout_indices(*layout, 0, size, coordinates(mesh)[i]), expected[i])
          << to_string(*layout);
    }
  }
}

/// If two neighbouring Digits (factors of a dimension's size) give each rank the same indices as
/// one larger Digit, the layout must store the larger Digit.
TEST(Layout, MergesDigitsThatEqualOneLargerDigit) {
  const testing::Indices mesh{2, 3};
  int merged = 0;
  for (const auto& digits : digit_pairs()) {
    auto order = digits[0].mesh_dims;
    order.insert(order.end(), digits[1].mesh_dims.begin(), digits[1].mesh_dims.end());
    const std::vector<Digit> whole{{digits[0].extent * digits[1].extent, order}, {1, {}}};
    if (owned(mesh, digits) != owned(mesh, whole)) {
      continue;
    }
    EXPECT_EQ(Layout::intern(mesh, one_dim(digits)), Layout::intern(mesh, one_dim(whole)))
        << digits[0].extent << " " << digits[1].extent;
    ++merged;
  }
  EXPECT_GT(merged, 50);
}

TEST(Layout, ReportsShardedAndPartialDimensions) {
  const auto layout =
      Layout::intern({2, 3, 2, 4}, {{{0, {2, 0}}}, {{2, {}}, {8, {3}}}}, {{1, ReduceOp::kMax}});
  EXPECT_EQ(layout->sharded_dim(0), 0);
  EXPECT_EQ(layout->sharded_dim(1), -1);
  EXPECT_EQ(layout->sharded_dim(3), 1);
  EXPECT_EQ(layout->mesh_dims_of(0), (std::vector<int>{2, 0}));
  EXPECT_EQ(layout->partial_on(1)->op, ReduceOp::kMax);
  EXPECT_EQ(layout->partial_on(0), nullptr);
  EXPECT_FALSE(layout->is_replicated());
  EXPECT_TRUE(layout->is_partial());
  EXPECT_TRUE(Layout::replicated({2, 3}, 2)->is_replicated());
}

TEST(Layout, PrintsDigitsAndReductions) {
  const LayoutPtr layout = Layout::intern({2, 2}, {{{0, {1, 0}}}, {}});
  EXPECT_EQ(detail::concat(layout, " ", *layout, " ", LayoutPtr()),
            "[m1,m0 | -] [m1,m0 | -] no layout");
  EXPECT_EQ(to_string(*Layout::intern({2, 2}, {{{3, {}}, {8, {0}}}}, {{1, ReduceOp::kSum}})),
            "[3 x 8:m0] partial{m1:sum}");
}

TEST(Layout, RefusesInvalidDigits) {
  const auto making = [](Layout::Dims dims, std::vector<PartialDim> partial = {}) {
    return [dims, partial] { Layout::intern({2}, dims, partial); };
  };
  testing::expect_refusals(
      {{"twice in a digit", making({{{0, {0, 0}}}}), {"mesh dimension 0 twice"}},
       {"in two dimensions", making({{{0, {0}}}, {{0, {0}}}}), {"mesh dimension 0 twice"}},
       {"partial", making({{{0, {0}}}}, {{0, ReduceOp::kSum}}), {"mesh dimension 0 twice"}},
       {"large", making({{{0, {1}}}}), {"mesh dimension 1,"}},
       {"negative", making({{{0, {-1}}}}), {"mesh dimension -1,"}},
       {"no extent", making({{{2, {}}, {0, {0}}}}), {"a digit of extent 0"}}});
}

TEST(Layout, IsOneObjectForAllThreads) {
  constexpr int kThreads = 8;
  constexpr int kLayouts = 200;
  std::vector<std::vector<LayoutPtr>> seen(kThreads);
  std::vector<std::thread> threads;
  for (auto& mine : seen) {
    threads.emplace_back([&mine] {
      for (int i = 0; i < kLayouts; ++i) {
        mine.push_back(Layout::intern({7, 5}, {{{3, {}}, {1000 + i, {0}}}, {{0, {1}}}}));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& mine : seen) {
    EXPECT_EQ(mine, seen.front());
  }
}

TEST(MeshShape, NumbersRanksInRowMajorOrder) {
  const MeshShape mesh({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.numel(), 6);
  EXPECT_EQ(mesh.coordinate(4), (Indices{1, 1}));
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(mesh.index(mesh.coordinate(i)), i);
  }
  EXPECT_EQ(mesh.dim("tp"), 1);
  EXPECT_EQ(MeshShape().numel(), 1);
  EXPECT_TRUE(MeshShape().coordinate(0).empty());
  EXPECT_EQ(to_string(MeshShape({2, 2}, {"dp", "tp"})), "(dp=2, tp=2)");
  EXPECT_EQ(detail::concat(MeshShape({2, 2})), "(2, 2)");
}

TEST(MeshShape, RefusesInvalidMeshesAndPositionsOutside) {
  const MeshShape mesh({2, 3}, {"dp", "tp"});
  testing::expect_refusals(
      {{"size", [] { MeshShape({2, 0}); }, {"size 0"}},
       {"one name", [] { MeshShape({2, 2}, {"dp"}); }, {"2 dimensions", "1 names"}},
       {"equal names", [] { MeshShape({2, 2}, {"dp", "dp"}); }, {"\"dp\""}},
       {"empty name", [] { MeshShape({2, 2}, {"dp", ""}); }, {"empty name"}},
       {"unknown name", [&] { mesh.dim("pp"); }, {"\"pp\""}},
       {"large position", [&] { mesh.coordinate(6); }, {"position 6"}},
       {"negative position", [&] { mesh.coordinate(-1); }, {"position -1"}},
       {"large coordinate", [&] { mesh.index({0, 3}); }, {"coordinate 3"}},
       {"short coordinate", [&] { mesh.index({0}); }, {"1 numbers"}}});
}

struct Case {
  Indices mesh;
  Layout::Dims dims;
  Indices sizes;
};

/// Returns layouts with even, uneven, empty, nested and strided shards, in up to three dimensions.
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

TEST(LayoutMath, ChunksLikePyTorch) {
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

template <class Check>
void for_each_place(const Check& check) {
  for (const auto& c : cases()) {
    const auto layout = Layout::intern(c.mesh, c.dims);
    SCOPED_TRACE(to_string(*layout));
    for (const auto& at : coordinates(c.mesh)) {
      check(c, *layout, at);
    }
  }
}

TEST(LayoutMath, LocalSizesAndGlobalIndicesMatchTheOwnedIndices) {
  for_each_place([](const Case& c, const Layout& layout, const Indices& at) {
    const auto sizes = local_sizes(layout, c.sizes, at);
    std::int64_t numel = 1;
    for (int d = 0; d < layout.tensor_ndim(); ++d) {
      const auto i = static_cast<std::size_t>(d);
      const auto owned = layout_indices(layout, d, c.sizes[i], at);
      EXPECT_EQ(sizes[i], static_cast<std::int64_t>(owned.size()));
      EXPECT_EQ(local_size(layout, d, c.sizes[i], at), sizes[i]);
      EXPECT_EQ(global_indices(layout, d, c.sizes[i], at), owned);
      numel *= sizes[i];
    }
    EXPECT_EQ(local_numel(layout, c.sizes, at), numel);
  });
}

/// The Boxes (blocks of global indices) of a rank must cover its local tensor exactly once.
TEST(LayoutMath, BoxesCoverTheLocalTensorOnce) {
  for_each_place([](const Case& c, const Layout& layout, const Indices& at) {
    std::int64_t covered = 0;
    for (const auto& box : owned_boxes(layout, c.sizes, at)) {
      std::int64_t numel = 1;
      for (std::size_t d = 0; d < c.sizes.size(); ++d) {
        const auto owned = layout_indices(layout, static_cast<int>(d), c.sizes[d], at);
        ASSERT_GT(box.sizes[d], 0);
        for (std::int64_t i = 0; i < box.sizes[d]; ++i) {
          EXPECT_EQ(owned.at(static_cast<std::size_t>(box.local_offset[d] + i)),
                    box.global_offset[d] + i);
        }
        numel *= box.sizes[d];
      }
      covered += numel;
    }
    EXPECT_EQ(covered, local_numel(layout, c.sizes, at));
  });
}

TEST(LayoutMath, BoxesAreContiguousRangesOfIndices) {
  const auto boxes = [](const LayoutPtr& layout, const Indices& sizes, const Indices& at) {
    return owned_boxes(*layout, sizes, at);
  };
  EXPECT_EQ(boxes(Layout::intern({2, 2}, {{{0, {1, 0}}}, {}}), {7, 3}, {1, 0}),
            (std::vector<Box>{{{2, 0}, {0, 0}, {2, 3}}}));
  EXPECT_EQ(boxes(Layout::intern({2}, {{{3, {}}, {4, {0}}}}), {12}, {1}),
            (std::vector<Box>{{{2}, {0}, {2}}, {{6}, {2}, {2}}, {{10}, {4}, {2}}}));
  EXPECT_EQ(boxes(Layout::replicated({2}, 0), {}, {1}).size(), 1U);
  const auto rows = Layout::intern({4}, {{{0, {0}}}, {}});
  EXPECT_TRUE(boxes(rows, {3, 5}, {3}).empty());
  EXPECT_EQ(local_sizes(*rows, Indices{3, 5}, Indices{3}), (Indices{0, 5}));
}

TEST(FlatPlace, RoundTripsAndRefusesWrongLengths) {
  const auto layout = Layout::intern({2}, {{{3, {}}, {4, {0}}}, {}});
  const FlatPlace place{{12, 5}, owned_boxes(*layout, Indices{12, 5}, Indices{1})};
  const Indices numbers = flat_place(place);
  EXPECT_EQ(numbers.size(), 2U + 3 * 6);
  EXPECT_EQ(read_flat_place(numbers, 2), place);
  EXPECT_EQ(read_flat_place(Indices{12, 5}, 2), (FlatPlace{{12, 5}, {}}));
  EXPECT_ERROR(read_flat_place(Indices{12, 5, 1}, 2), "3 numbers");
  EXPECT_ERROR(read_flat_place(Indices{}, 0), "0 dimensions");
}

TEST(LayoutMath, RefusesWrongDimensionCounts) {
  const auto layout = Layout::replicated({2}, 1);
  EXPECT_ERROR(local_sizes(*layout, Indices{1, 2}, Indices{0}), "was given sizes of 2 dimensions");
  EXPECT_ERROR(local_sizes(*layout, Indices{1}, Indices{0, 0}), "was given a coordinate of 2");
}

}  // namespace
}  // namespace tessera
