#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>
#include <optional>

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

TEST_F(EnvironmentSwitch, AcceptsOnOffValuesAndRefusesOtherText) {
  EXPECT_EQ(environment_switch(kName), std::nullopt);
  const auto value_of = [](const char* text) {
    setenv(kName, text, 1);
    return environment_switch(kName);
  };
  for (const char* text : {"1", "true", "on"}) {
    EXPECT_EQ(value_of(text), true) << text;
  }
  for (const char* text : {"0", "false", "off"}) {
    EXPECT_EQ(value_of(text), false) << text;
  }
  EXPECT_EQ(value_of(""), std::nullopt);
  setenv(kName, "yes", 1);
  EXPECT_ERROR(environment_switch(kName), "TESSERA_SWITCH_OF_A_TEST=yes", "1, true or on",
               "0, false or off");
}

}  // namespace
}  // namespace tessera::detail

namespace tessera {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 20;

[[maybe_unused]] long pages_cleared() {
  rusage before{};
  getrusage(RUSAGE_SELF, &before);
  const std::vector<char> bytes(kBytes, 1);
  rusage after{};
  getrusage(RUSAGE_SELF, &after);
  EXPECT_EQ(bytes.back(), 1);
  return after.ru_minflt - before.ru_minflt;
}

TEST(KeepFreedMemory, LetsTheNextAllocationReuseFreedMemory) {
#if !defined(__GLIBC__) || defined(TESSERA_SANITIZED)
  GTEST_SKIP() << "memory is not glibc's";
#else
  keep_freed_memory();
  pages_cleared();
  EXPECT_LT(pages_cleared(), static_cast<long>(kBytes / 4096 / 10));
#endif
}

class StopSignalsTest : public ::testing::TestWithParam<int> {};

TEST_P(StopSignalsTest, RecordsTheSignalUntilDestroyed) {
  {
    const StopSignals signals;
    EXPECT_FALSE(signals.received());
    raise(GetParam());
    EXPECT_TRUE(signals.received());
  }
  EXPECT_FALSE(StopSignals().received());
  EXPECT_EXIT(raise(GetParam()), ::testing::KilledBySignal(GetParam()), "");
}

INSTANTIATE_TEST_SUITE_P(All, StopSignalsTest, ::testing::Values(SIGTERM, SIGUSR1));

}  // namespace
}  // namespace tessera
