// --restarts: a job that failed begins again.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "launcher.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

class LauncherRestart : public ::testing::Test {
 protected:
  // Each start of rank 0 adds a line to the file "starts".
  std::vector<std::string> Job(int restarts, const std::string& script) {
    auto arguments =
        Shell(2, "S='" + starts() + "'; [ $RANK = 1 ] || echo $MASTER_PORT >> $S; " + script);
    arguments.insert(arguments.begin(), {"--restarts", std::to_string(restarts)});
    return arguments;
  }
  std::string starts() const { return (folder_ / "starts").string(); }
  std::ptrdiff_t CountStarts() const {
    const std::string lines = ReadFile(starts());
    return std::count(lines.begin(), lines.end(), '\n');
  }

  TemporaryFolder folder_;
};

TEST_F(LauncherRestart, RepeatsUntilTheJobSucceeds) {
  const auto result = Launcher(Job(5,
                                   "[ $RANK = 1 ] && exit 0; "
                                   "[ $(wc -l < $S) -lt 3 ] && kill -9 $$; exit 0"))
                          .wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(CountStarts(), 3);
  EXPECT_EQ(result.err.find("is left"), std::string::npos) << result.err;
}

TEST_F(LauncherRestart, CountsAndEndsWithTheLastFailure) {
  const auto result = Launcher(Job(2, "[ $RANK = 1 ] && exit 7; sleep 1000")).wait();
  EXPECT_EQ(result.code, 7);
  EXPECT_EQ(CountStarts(), 3);
  EXPECT_CONTAINS(result.err, "tessera-run: starting the job again (restart 1 of 2)\n",
                  "tessera-run: starting the job again (restart 2 of 2)\n",
                  "tessera-run: no restart of 2 is left\n");
}

TEST_F(LauncherRestart, KeepsTheRecordsOfEachStartApart) {
  const std::string given = (folder_ / "run").string();
  auto arguments = Job(1,
                       "touch $TESSERA_RUN_DIR/world-0.rank-$RANK.flight "
                       "$TESSERA_RUN_DIR/$(wc -l < $S).seen; "
                       "[ $RANK = 0 ] && [ $(wc -l < $S) = 1 ] && exit 3; exit 0");
  arguments.insert(arguments.begin(), {"--run-dir", given});
  const auto result = Launcher(arguments).wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_CONTAINS(result.err, "tessera-run --explain " + given + "\n");
  EXPECT_EQ(result.err.find("--explain " + given + "/run-2"), std::string::npos)
      << "the second start ended well";
  EXPECT_TRUE(std::filesystem::exists(given + "/run-2/2.seen"));
  EXPECT_FALSE(std::filesystem::exists(given + "/2.seen"));
}

TEST_F(LauncherRestart, IsNotForAJobThatWasStopped) {
  const auto result = Launcher(Job(2, "exit 75")).wait();
  EXPECT_EQ(result.code, 75);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(CountStarts(), 1);
}

TEST_F(LauncherRestart, DoesNotFollowASignalToTheLauncher) {
  const std::string up = (folder_ / "up").string();
  Launcher launcher(Job(2, "[ $RANK = 1 ] || touch '" + up + "'; sleep 1000"));
  WaitForFile(up);
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.wait().code, 128 + SIGTERM);
  EXPECT_EQ(CountStarts(), 1);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST_F(LauncherRestart, LeavesNoRankOfTheFailedJob) {
  Launcher launcher(Job(1, "[ $RANK = 1 ] && exit 7; sleep 1000 & setsid sleep 1000 & wait"));
  EXPECT_EQ(launcher.wait().code, 7);
  EXPECT_TRUE(launcher.left_over().empty());
}

}  // namespace
}  // namespace tessera::testing
