#include "tessera/core/process.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace tessera {
namespace {

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
