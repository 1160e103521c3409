#include "tessera/core/detail/bounded_cache.h"
#include "testing/errors.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace tessera::detail {
namespace {

TEST(BoundedCache, ComputesOnceAndCounts) {
  BoundedCache<int, std::string> cache(4);
  int computed = 0;
  const auto text = [&](int key) {
    ++computed;
    return std::to_string(key);
  };
  EXPECT_EQ(*cache.get(7, text), "7");
  EXPECT_EQ(*cache.get(7, text), "7");
  EXPECT_EQ(computed, 1);
  EXPECT_EQ(cache.hits(), 1);
  EXPECT_EQ(cache.misses(), 1);
}

TEST(BoundedCache, NeverHoldsMoreThanItsCapacity) {
  BoundedCache<int, int> cache(3);
  for (int i = 0; i < 1000; ++i) {
    cache.insert(i, i);
    EXPECT_LE(cache.size(), 3U);
  }
  EXPECT_EQ(*cache.find(999), 999);
}

TEST(BoundedCache, KeepsWhatIsUsed) {
  BoundedCache<int, int> cache(4);
  cache.insert(-1, 0);
  for (int i = 0; i < 100; ++i) {
    ASSERT_NE(cache.find(-1), nullptr) << i;
    cache.insert(i, i);
  }
}

TEST(BoundedCache, AValueOutlivesItsEntry) {
  BoundedCache<int, std::string> cache(1);
  const auto first = cache.insert(1, "one");
  cache.insert(2, "two");
  EXPECT_EQ(cache.find(1), nullptr);
  EXPECT_EQ(*first, "one");
}

TEST(BoundedCache, KeepsTheFirstOfTwoValues) {
  BoundedCache<int, int> cache(2);
  cache.insert(1, 10);
  EXPECT_EQ(*cache.insert(1, 20), 10);
}

TEST(BoundedCache, KeepsNothingWhenComputingThrows) {
  BoundedCache<int, int> cache(2);
  EXPECT_ERROR(cache.get(1, [](int) -> int { fail("not computed"); }), "not computed");
  EXPECT_EQ(cache.size(), 0U);
}

TEST(BoundedCache, RefusesCapacityZero) {
  EXPECT_ERROR((BoundedCache<int, int>(0)), "a cache of capacity 0");
}

TEST(BoundedCache, ServesSeveralThreads) {
  BoundedCache<int, int> cache(16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&cache, t] {
      for (int i = 0; i < 2000; ++i) {
        const int key = (i * 7 + t) % 40;
        EXPECT_EQ(*cache.get(key, [](int k) { return k * k; }), key * key);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(cache.hits() + cache.misses(), 8000);
  EXPECT_LE(cache.size(), 16U);
}

}  // namespace
}  // namespace tessera::detail
