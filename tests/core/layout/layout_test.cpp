#include "tessera/core/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "oracle.h"
#include "tessera/core/error.h"
#include "testing/errors.h"

namespace tessera {
namespace {

using testing::coordinates;
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

TEST(Layout, KeepsTheOrderOfMeshDimensions) {
  EXPECT_NE(Layout::intern({2, 2}, one_dim({{0, {0, 1}}})),
            Layout::intern({2, 2}, one_dim({{0, {1, 0}}})));
}

TEST(Layout, DropsTheExtentOfASingleDigit) {
  EXPECT_EQ(Layout::intern({2}, one_dim({{8, {0}}})), Layout::intern({2}, one_dim({{0, {0}}})));
  EXPECT_EQ(Layout::intern({2}, one_dim({{8, {}}})), Layout::replicated({2}, 1));
}

TEST(Layout, MergesLocalDigits) {
  EXPECT_EQ(Layout::intern({2}, one_dim({{2, {}}, {3, {}}, {4, {0}}})),
            Layout::intern({2}, one_dim({{6, {}}, {4, {0}}})));
}

TEST(Layout, DropsDigitsOfExtentOne) {
  EXPECT_EQ(Layout::intern({2}, one_dim({{1, {}}, {8, {0}}, {1, {}}})),
            Layout::intern({2}, one_dim({{0, {0}}})));
}

TEST(Layout, MergesALocalDigitBehindAnEvenShard) {
  EXPECT_EQ(Layout::intern({2}, one_dim({{4, {0}}, {3, {}}})),
            Layout::intern({2}, one_dim({{0, {0}}})));
}

TEST(Layout, KeepsALocalDigitBehindAnUnevenShard) {
  const auto layout = Layout::intern({2}, one_dim({{5, {0}}, {4, {}}}));
  EXPECT_EQ(layout->digits(0).size(), 2U);
}

TEST(Layout, MergesNeighbouringShardsThatNest) {
  EXPECT_EQ(Layout::intern({2, 3}, one_dim({{2, {0}}, {9, {1}}})),
            Layout::intern({2, 3}, one_dim({{0, {0, 1}}})));
}

TEST(Layout, OrdersPartialDimensions) {
  EXPECT_EQ(Layout::intern({2, 2}, {{}}, {{1, ReduceOp::kSum}, {0, ReduceOp::kMax}}),
            Layout::intern({2, 2}, {{}}, {{0, ReduceOp::kMax}, {1, ReduceOp::kSum}}));
}

/// What each coordinate owns under digits as written, without canonicalising them together.
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

/// All pairs of digits with extents up to 6 on a 2 x 3 mesh.
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

TEST(Layout, CanonicalFormOwnsWhatTheDigitsOwn) {
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

/// Lists of digits over the same mesh dimensions that own the same are one object, where the two
/// can be spelled as neighbours at all (extents >= 2, so that every digit shows).
TEST(Layout, DigitsThatOwnWhatOneDigitOwnsAreThatDigit) {
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

TEST(Layout, AnswersWhatSplitsWhat) {
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

TEST(Layout, RefusesWhatIsNoLayout) {
  EXPECT_ERROR(Layout::intern({2}, {{{0, {0, 0}}}}), "uses mesh dimension 0 twice");
  EXPECT_ERROR(Layout::intern({2}, {{{0, {0}}}, {{0, {0}}}}), "uses mesh dimension 0 twice");
  EXPECT_ERROR(Layout::intern({2}, {{{0, {0}}}}, {{0, ReduceOp::kSum}}),
               "uses mesh dimension 0 twice");
  EXPECT_ERROR(Layout::intern({2}, {{{0, {1}}}}), "uses mesh dimension 1 of a mesh with 1");
  EXPECT_ERROR(Layout::intern({2}, {{{0, {-1}}}}), "uses mesh dimension -1 of a mesh with 1");
  EXPECT_ERROR(Layout::intern({2}, {{{2, {}}, {0, {0}}}}), "a digit of extent 0 beside others");
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

LayoutPtr folded(std::int64_t rows, std::int64_t columns) {
  return Layout::intern({7, 5}, {{{rows, {}}, {columns, {0}}}, {{0, {1}}}});
}

TEST(Layout, IsFreedWithItsLastHolderIfItHasSizes) {
  const auto before = Layout::count();
  for (int size = 2; size < 500; ++size) {
    const auto layout = folded(3, size);
    auto other = layout;
    const auto moved = std::move(other);
    other = moved;
    EXPECT_EQ(folded(3, size), layout);
    EXPECT_EQ(layout->ptr(), moved);
    EXPECT_EQ(layout->digits(0)[1].extent, size);
    EXPECT_EQ(Layout::count(), before + 1);
  }
  EXPECT_EQ(Layout::count(), before);
}

TEST(Layout, IsKeptIfItHasNoSizes) {
  const void* first = Layout::intern({2, 3}, {{{0, {1, 0}}}, {}}).get();
  const auto before = Layout::count();
  EXPECT_EQ(Layout::intern({2, 3}, {{{0, {1, 0}}}, {}}).get(), first);
  EXPECT_EQ(Layout::count(), before);
}

TEST(Layout, IsMadeAndDroppedByManyThreads) {
  const auto before = Layout::count();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 5000; ++i) {
        const auto layout = folded(3, 1000 + i % 3);
        const std::vector<LayoutPtr> copies(4, layout);
        ASSERT_EQ(copies.back()->digits(0)[1].extent, 1000 + i % 3);
        ASSERT_EQ(folded(3, 1000 + i % 3), layout);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(Layout::count(), before);
}

}  // namespace
}  // namespace tessera
