#include "device/pack.h"

#include <gtest/gtest.h>

#include <tuple>

#include "kernels/device/rounding.h"

namespace tessera::kernels {
namespace {

template <class T>
PackPiece piece_of(const std::vector<T>& from, void* to) {
  return {.from = from.data(), .to = to, .rows = 1, .size = static_cast<std::int64_t>(from.size())};
}

/// All chunks, three threads each.
template <class From, class To>
void run(const Pack& call) {
  for (std::int32_t number = 0; number < call.list.chunks; ++number) {
    for (int thread = 0; thread < 3; ++thread) {
      copy_chunk<From, To>(call, number, thread, 3);
    }
  }
}

/// Converts every element alone, so that the kernel's vectors and chunks are no part of it.
template <class To, class From>
To converted(From value) {
  return static_cast<To>(static_cast<float>(value));
}

template <class Types>
class PackOnDevice : public ::testing::Test {};
using TypePairs =
    ::testing::Types<std::tuple<float, c10::BFloat16>, std::tuple<c10::BFloat16, float>,
                     std::tuple<float, float>, std::tuple<float, c10::Half>,
                     std::tuple<c10::Half, c10::BFloat16>>;
TYPED_TEST_SUITE(PackOnDevice, TypePairs);

TYPED_TEST(PackOnDevice, CopiesPiecesOfAnySize) {
  using From = std::tuple_element_t<0, TypeParam>;
  using To = std::tuple_element_t<1, TypeParam>;
  std::vector<std::vector<From>> from;
  std::vector<std::vector<To>> to;
  Pack call{};
  for (const std::int64_t size : {1, 7, 8, 9, 16384, 16385, 40000}) {
    from.push_back(normals<From>(size, 100, static_cast<unsigned>(size)));
    to.emplace_back(static_cast<std::size_t>(size), To(7.0F));
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    ASSERT_TRUE(call.list.add(piece_of(from[i], to[i].data())));
  }
  EXPECT_EQ(call.list.chunks, 1 + 1 + 1 + 1 + 1 + 2 + 3);
  run<From, To>(call);
  for (std::size_t i = 0; i < from.size(); ++i) {
    for (std::size_t k = 0; k < from[i].size(); ++k) {
      ASSERT_EQ(static_cast<float>(to[i][k]), static_cast<float>(converted<To>(from[i][k])))
          << i << " " << k;
    }
  }
}

/// A tensor of 4 ranks' rows into a buffer that has more between them, with and without vectors.
TYPED_TEST(PackOnDevice, CopiesRowsThatAreApart) {
  using From = std::tuple_element_t<0, TypeParam>;
  using To = std::tuple_element_t<1, TypeParam>;
  for (const std::int64_t size : {5, 24, 5000}) {
    for (const std::int64_t apart : {size, size + 8, size + 3}) {
      const std::vector<From> from = normals<From>(4 * size, 1, 1);
      std::vector<To> to(static_cast<std::size_t>(4 * apart), To(7.0F));
      Pack call{};
      ASSERT_TRUE(call.list.add({.from = from.data(),
                                 .to = to.data(),
                                 .rows = 4,
                                 .size = size,
                                 .from_stride = size,
                                 .to_stride = apart}));
      run<From, To>(call);
      for (std::int64_t i = 0; i < 4 * apart; ++i) {
        const std::int64_t column = i % apart;
        const float expected = column < size
                                   ? static_cast<float>(converted<To>(
                                         from[static_cast<std::size_t>(i / apart * size + column)]))
                                   : 7.0F;
        ASSERT_EQ(static_cast<float>(to[static_cast<std::size_t>(i)]), expected) << i;
      }
    }
  }
}

TYPED_TEST(PackOnDevice, TakesMisalignedPieces) {
  using From = std::tuple_element_t<0, TypeParam>;
  using To = std::tuple_element_t<1, TypeParam>;
  const std::vector<From> from = normals<From>(38, 1, 1);
  std::vector<To> to(39, To(7.0F));
  Pack call{};
  ASSERT_TRUE(call.list.add({.from = from.data() + 1, .to = to.data() + 1, .rows = 1, .size = 37}));
  run<From, To>(call);
  for (std::size_t i = 1; i < 38; ++i) {
    EXPECT_EQ(static_cast<float>(to[i]), static_cast<float>(converted<To>(from[i])));
  }
  EXPECT_EQ(static_cast<float>(to[0]), 7.0F);
  EXPECT_EQ(static_cast<float>(to[38]), 7.0F);
}

TYPED_TEST(PackOnDevice, KeepsInfinitiesAndNaN) {
  using From = std::tuple_element_t<0, TypeParam>;
  using To = std::tuple_element_t<1, TypeParam>;
  std::vector<From> from(9, From(0.0F));
  from[0] = From(std::numeric_limits<float>::infinity());
  from[8] = From(std::numeric_limits<float>::quiet_NaN());
  std::vector<To> to(9);
  Pack call{};
  ASSERT_TRUE(call.list.add(piece_of(from, to.data())));
  run<From, To>(call);
  EXPECT_EQ(static_cast<float>(to[0]), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(static_cast<float>(to[8])));
}

TEST(Chunks, AFullListTakesNoMore) {
  Pack call{};
  const std::vector<float> from(1);
  std::vector<float> to(1);
  int added = 0;
  while (call.list.add(piece_of(from, to.data()))) {
    ++added;
  }
  EXPECT_EQ(added, 64);
  EXPECT_LE(sizeof(Pack), 4096U);
}

TEST(Chunks, EveryElementIsInOne) {
  Chunked<PackPiece, 64, 10> list{};
  const std::vector<std::int64_t> sizes{10, 1, 25, 9, 31};
  for (const std::int64_t size : sizes) {
    ASSERT_TRUE(list.add({.rows = 1, .size = size}));
  }
  std::vector<std::int64_t> next(sizes.size(), 0);
  for (std::int32_t number = 0; number < list.chunks; ++number) {
    const Chunk chunk = chunk_of(list, number);
    EXPECT_EQ(chunk.begin, next[static_cast<std::size_t>(chunk.piece)]);
    next[static_cast<std::size_t>(chunk.piece)] = chunk.end;
  }
  EXPECT_EQ(next, sizes);
}

}  // namespace
}  // namespace tessera::kernels
