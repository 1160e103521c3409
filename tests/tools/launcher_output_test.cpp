#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "launcher.h"

namespace tessera::testing {
namespace {

TEST(LauncherOutput, LeavesRankZerosStandardOutputAlone) {
  EXPECT_EQ(RunShell(1, "printf 'step 1\\rstep 2'").out, "step 1\rstep 2");
}

TEST(LauncherOutput, NamesTheRankOfEveryOtherLine) {
  const auto result = RunShell(2, "[ $RANK = 0 ] || echo out; echo err >&2");
  EXPECT_EQ(result.out, "[rank 1] out\n");
  EXPECT_NE(result.err.find("[rank 0] err\n"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("[rank 1] err\n"), std::string::npos) << result.err;
}

TEST(LauncherOutput, KeepsTheLinesOfRanksWhole) {
  const auto out = RunShell(4, "for i in $(seq 1 2000); do echo abcdefghij; done").out;
  std::size_t lines = 0;
  for (std::size_t start = 0; start < out.size(); ++lines) {
    const auto end = out.find('\n', start);
    auto line = out.substr(start, end - start);
    if (line.front() == '[') {
      line.erase(0, line.find(' ', line.find("rank ") + 5) + 1);
    }
    ASSERT_EQ(line, "abcdefghij");
    start = end + 1;
  }
  EXPECT_EQ(lines, 4U * 2000);
}

TEST(LauncherOutput, PassesAnUnfinishedLastLineOn) {
  EXPECT_EQ(RunShell(2, "[ $RANK = 0 ] || printf end").out, "[rank 1] end\n");
}

TEST(LauncherOutput, LosesNothingOfALargeOutput) {
  const auto out = RunShell(2, "[ $RANK = 0 ] || head -c 3000000 /dev/zero | tr '\\0' x").out;
  EXPECT_EQ(std::count(out.begin(), out.end(), 'x'), 3'000'000);
}

}  // namespace
}  // namespace tessera::testing
