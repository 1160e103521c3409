#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "launcher.h"
#include "testing/errors.h"

namespace tessera::testing {
namespace {

TEST(LauncherOutput, LeavesRankZerosStandardOutputAlone) {
  EXPECT_EQ(RunShell(1, "printf 'step 1\\rstep 2'").out, "step 1\rstep 2");
}

TEST(LauncherOutput, NamesTheRankOfEveryOtherLine) {
  const auto result = RunShell(2, "[ $RANK = 0 ] || echo out; echo err of $RANK >&2");
  EXPECT_EQ(result.out, "[rank 1] out\n");
  EXPECT_CONTAINS(result.err, "[rank 0] err of 0\n", "[rank 1] err of 1\n");
}

TEST(LauncherOutput, ShowsEqualLinesOfRanksOnce) {
  const auto err = RunTogether(5,
                               "echo before $RANK >&2; "
                               "[ $RANK = 3 ] && echo other >&2 || echo same >&2")
                       .err;
  EXPECT_CONTAINS(err, "[ranks 0-2, 4] same\n", "[rank 3] other\n", "[rank 1] before 1\n");
  EXPECT_EQ(err.find("same"), err.rfind("same")) << err;
}

TEST(LauncherOutput, ShowsLinesInWhichRanksNameThemselvesOnce) {
  const auto said = [](int ranks) {
    return RunTogether(ranks, "echo \"rank $RANK: no rank 17 came, rank 0 is there\" >&2").err;
  };
  EXPECT_CONTAINS(said(9), "[ranks 1-8] rank N: no rank 17 came, rank 0 is there\n");
  EXPECT_CONTAINS(said(3), "[rank 2] rank 2: no rank 17 came, rank 0 is there\n");
}

TEST(LauncherOutput, CountsManyRanksThatAreNotInARow) {
  const auto result = RunTogether(40, "[ $((RANK % 2)) = 0 ] && echo even >&2; exit 0");
  EXPECT_EQ(result.err, "[20 ranks from 0 to 38] even\n");
}

TEST(LauncherOutput, CountsWhatIsRepeated) {
  const auto result = RunTogether(2, "for i in 1 2 3 4 5; do echo again >&2; done; echo $RANK >&2");
  EXPECT_CONTAINS(result.err, "[ranks 0, 1] again (5 times)\n", "[rank 0] 0\n", "[rank 1] 1\n");
}

TEST(LauncherOutput, KeepsTheOrderOfEachRanksErrors) {
  const auto result = RunShell(2,
                               "[ $RANK = 0 ] && printf 'a\\nb\\na\\n' >&2; "
                               "[ $RANK = 0 ] || printf 'b\\na\\nb\\n' >&2");
  for (const auto& [rank, order] : {std::pair{"0", "aba"}, std::pair{"1", "bab"}}) {
    std::string found;
    std::istringstream lines(result.err);
    for (std::string line; std::getline(lines, line);) {
      if (line.substr(0, line.find(']')).find(rank) != std::string::npos) {
        found += line.back();
      }
    }
    EXPECT_EQ(found, order) << result.err;
  }
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

TEST(LauncherOutput, SaysThatItCouldNotBeWritten) {
  const auto run = [](const char* where) {
    return Launcher({"sh", "-c",
                     "$RUN --nproc 2 sh -c '[ $RANK = 0 ] || echo out' 2>&1 >" +
                         std::string(where) + "; echo $?"},
                    {{"RUN", TESSERA_RUN}})
        .wait()
        .out;
  };
  EXPECT_EQ(run("/dev/full"),
            "tessera-run: standard output lacks lines of the ranks: No space left on device\n1\n");
  EXPECT_EQ(run("/dev/null"), "0\n");
}

/// A job that runs with one of its standard streams closed; the exit code alone tells of it.
TEST(LauncherOutput, NeedsNoStandardStreams) {
  for (const char* closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    const auto run = Launcher({"sh", "-c",
                               "timeout -s KILL 5 $RUN --nproc 2 sh -c 'echo out; exit 0' " +
                                   std::string(closed) + "; echo code $?"},
                              {{"RUN", TESSERA_RUN}})
                         .wait();
    EXPECT_CONTAINS(run.out, "code 0\n") << closed;
  }
}

TEST(LauncherOutput, LosesNothingOfALargeOutput) {
  const auto out = RunShell(2, "[ $RANK = 0 ] || head -c 3000000 /dev/zero | tr '\\0' x").out;
  EXPECT_EQ(std::count(out.begin(), out.end(), 'x'), 3'000'000);
}

}  // namespace
}  // namespace tessera::testing
