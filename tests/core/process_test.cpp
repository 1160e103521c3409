#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/core/detail/bounded_cache.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/process.h"
#include "testing/errors.h"

namespace tessera::detail {
namespace {

constexpr auto kName = "TESSERA_SWITCH_OF_A_TEST";

class EnvironmentSwitch : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv(kName); }
};

TEST_F(EnvironmentSwitch, IsReadOneWay) {
  for (const char* on : {"1", "true", "on"}) {
    setenv(kName, on, 1);
    EXPECT_EQ(environment_switch(kName), true) << on;
  }
  for (const char* off : {"0", "false", "off"}) {
    setenv(kName, off, 1);
    EXPECT_EQ(environment_switch(kName), false) << off;
  }
}

TEST_F(EnvironmentSwitch, SaysNothingWhereItIsNotSetOrEmpty) {
  EXPECT_EQ(environment_switch(kName), std::nullopt);
  setenv(kName, "", 1);
  EXPECT_EQ(environment_switch(kName), std::nullopt);
}

TEST_F(EnvironmentSwitch, RefusesOtherValues) {
  setenv(kName, "yes", 1);
  EXPECT_ERROR(environment_switch(kName),
               "environment variable TESSERA_SWITCH_OF_A_TEST=yes: not a switch; set it to 1, "
               "true or on, or to 0, false or off");
}

}  // namespace
}  // namespace tessera::detail

namespace tessera {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 20;

/// Pages that the system had to clear for a vector of kBytes.
[[maybe_unused]] long pages_cleared() {
  rusage before{};
  getrusage(RUSAGE_SELF, &before);
  const std::vector<char> bytes(kBytes, 1);
  rusage after{};
  getrusage(RUSAGE_SELF, &after);
  EXPECT_EQ(bytes.back(), 1);
  return after.ru_minflt - before.ru_minflt;
}

TEST(KeepFreedMemory, HasTheNextAllocationFindIt) {
#if !defined(__GLIBC__) || defined(TESSERA_SANITIZED)
  GTEST_SKIP() << "memory is not glibc's";
#else
  keep_freed_memory();
  pages_cleared();
  EXPECT_LT(pages_cleared(), static_cast<long>(kBytes / 4096 / 10));
#endif
}

class StopSignalsOf : public ::testing::TestWithParam<int> {};

TEST_P(StopSignalsOf, AreNotedInsteadOfEndingTheProcess) {
  const StopSignals signals;
  EXPECT_FALSE(signals.received());
  raise(GetParam());
  EXPECT_TRUE(signals.received());
}

TEST_P(StopSignalsOf, EndTheProcessAgainAfterwards) {
  { const StopSignals signals; }
  EXPECT_EXIT(raise(GetParam()), ::testing::KilledBySignal(GetParam()), "");
}

TEST_P(StopSignalsOf, AreForgottenByTheNext) {
  {
    const StopSignals signals;
    raise(GetParam());
  }
  EXPECT_FALSE(StopSignals().received());
}

INSTANTIATE_TEST_SUITE_P(All, StopSignalsOf, ::testing::Values(SIGTERM, SIGUSR1));

}  // namespace
}  // namespace tessera

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
