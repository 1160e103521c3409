// Training under the checker: in any order of the lanes nothing is used too early or too late.
#include <gtest/gtest.h>

#include <fmt/ranges.h>

#include "race/scenarios.h"

namespace tessera::race {
namespace {

class CheckedTraining : public ::testing::TestWithParam<Scenario> {};

TEST_P(CheckedTraining, HasNoRace) {
  const Findings findings = check(GetParam());
  EXPECT_TRUE(findings.faults.empty()) << fmt::format("{}", fmt::join(findings.faults, "\n"));
}

INSTANTIATE_TEST_SUITE_P(Ways, CheckedTraining, ::testing::ValuesIn(scenarios()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::race
