#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "launcher.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

TEST(LauncherExit, IsZeroWhenEveryRankSucceeds) {
  const auto result = RunShell(3, "true");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
}

TEST(LauncherExit, WaitsForTheLastRank) {
  const auto result = RunShell(2, "[ $RANK = 0 ] || { sleep 0.3; echo late; }");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "[rank 1] late\n");
}

TEST(LauncherExit, IsTheFailingRanksCode) {
  const auto result = RunShell(3, "[ $RANK != 1 ] || exit 7; sleep 100");
  EXPECT_EQ(result.code, 7);
  EXPECT_CONTAINS(result.err, "tessera-run: rank 1 (pid ");
  EXPECT_CONTAINS(result.err, ") exited with code 7; ending the other ranks\n");
}

TEST(LauncherExit, Is128PlusTheSignalOfAKilledRank) {
  const auto result = RunShell(2, "[ $RANK != 1 ] || kill -9 $$; sleep 100");
  EXPECT_EQ(result.code, 128 + 9);
  EXPECT_CONTAINS(result.err, ") was killed by SIGKILL (Killed); ending");
}

TEST(LauncherExit, ShowsTheErrorsOfTheFailingRankOnceAndLast) {
  const auto result = RunShell(3,
                               "case $RANK in 0) sleep 0.1; echo witness >&2; exit 1;; "
                               "1) printf 'first\\ncause\\n' >&2; exit 1;; *) sleep 100;; esac");
  EXPECT_CONTAINS(result.err,
                  "[rank 0] witness\n[rank 1] first\n[rank 1] cause\ntessera-run: rank 1 (pid ");
  EXPECT_CONTAINS(result.err, "tessera-run: rank 0 then exited with code 1\n");
  EXPECT_EQ(result.err.find("cause"), result.err.rfind("cause")) << result.err;
}

TEST(LauncherExit, ShowsTheErrorThatAllRanksHaveOnce) {
  const auto result = RunTogether(4, "echo bad file >&2; exit 3");
  EXPECT_CONTAINS(result.err, "[ranks 0-3] bad file\ntessera-run: rank ");
  EXPECT_EQ(result.err.find("bad file"), result.err.rfind("bad file")) << result.err;
}

TEST(LauncherExit, RepeatsTheLastLineOfARankThatWroteItLongBefore) {
  const auto result = RunShell(2,
                               "[ $RANK = 0 ] || { echo early >&2; sleep 0.6; exit 1; }; "
                               "sleep 0.4; echo later >&2; sleep 100");
  EXPECT_CONTAINS(result.err, "[rank 1] early\n", "  the last line of its standard error: early\n");
}

TEST(LauncherExit, ShowsAnUnfinishedLastLine) {
  const auto result = RunShell(1, "printf 'no end of line' >&2; exit 1");
  EXPECT_CONTAINS(result.err, "[rank 0] no end of line\n");
}

TEST(LauncherExit, SaysThatTheFailingRankWasSilent) {
  EXPECT_CONTAINS(RunShell(1, "exit 1").err, "  it wrote nothing to its standard error\n");
}

// Rank 0 fails because rank 1 is gone, as a collective would.
TEST(LauncherExit, NamesTheKilledRankAsTheCauseOfOthers) {
  TemporaryFolder folder;
  const auto result = RunShell(2,
                               "[ $RANK = 1 ] && { echo $$ > $DIR/new; mv $DIR/new $DIR/pid; "
                               "sleep 0.2; kill -9 $$; }\n"
                               "while [ ! -e $DIR/pid ]; do sleep 0.01; done\n"
                               "while grep -q '^State:.[^Z]' /proc/$(cat $DIR/pid)/status; do :; "
                               "done 2>/dev/null; echo peer is gone >&2; exit 3",
                               {{"DIR", folder.path()}});
  EXPECT_EQ(result.code, 128 + 9) << result.err;
  EXPECT_CONTAINS(result.err, "tessera-run: rank 1 (pid ");
  EXPECT_CONTAINS(result.err, "tessera-run: rank 0 then exited with code 3\n");
}

TEST(LauncherExit, EndsRanksThatIgnoreSigterm) {
  Launcher launcher(Shell(3,
                          "[ $RANK != 2 ] || { sleep 0.2; exit 5; }; trap '' TERM; "
                          "while :; do sleep 0.1; done"));
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 5);
  EXPECT_LT(result.took.count(), 20);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST(LauncherExit, EndsWhatFailedJobsRanksStarted) {
  Launcher launcher(
      Shell(2, "sleep 1000 & setsid sleep 1000 & [ $RANK = 0 ] || { sleep 0.2; exit 5; }; wait"));
  EXPECT_EQ(launcher.wait().code, 5);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST(LauncherExit, EndsWhatRanksLeftBehind) {
  Launcher launcher(Shell(2, "sleep 1000 & setsid sleep 1000 & exit 0"));
  EXPECT_EQ(launcher.wait().code, 0);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST(LauncherExit, Is127WithoutSuchAProgram) {
  const auto result = Launcher({"--nproc", "2", "--", "no-such-program"}).wait();
  EXPECT_EQ(result.code, 127);
  EXPECT_CONTAINS(result.err, "tessera-run: no-such-program was not found in PATH");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

TEST(LauncherExit, Is126WhereTheProgramMayNotRun) {
  TemporaryFolder folder;
  WriteFile(folder / "plain", "text");
  const auto result = Launcher({"--nproc", "2", "--", folder / "plain"}).wait();
  EXPECT_EQ(result.code, 126);
  EXPECT_CONTAINS(result.err, "plain cannot be run: Permission denied\n");
}

TEST(LauncherExit, NamesAPortInUse) {
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  getsockname(taken, reinterpret_cast<sockaddr*>(&address), &size);
  const auto where = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const auto result =
      Launcher({"--nproc", "2", "--nnodes", "2", "--rdzv", where, "--", "true"}).wait();
  close(taken);
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.err,
            "tessera-run: the port of " + where + " is in use: give --rdzv another port\n");
}

TEST(LauncherExit, NamesAHostThatIsNotThisNode) {
  const auto result =
      Launcher({"--nproc", "1", "--nnodes", "2", "--rdzv", "192.0.2.1:4711", "--", "true"}).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "192.0.2.1 is not an address of this machine");
}

struct BadLine {
  const char* name;
  std::vector<std::string> arguments;
  const char* message;
};

class LauncherCommandLine : public ::testing::TestWithParam<BadLine> {};

TEST_P(LauncherCommandLine, IsRefusedInOneLine) {
  const auto result = Launcher(GetParam().arguments).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, GetParam().message);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

INSTANTIATE_TEST_SUITE_P(
    All, LauncherCommandLine,
    ::testing::Values(
        BadLine{"NoProgram", {"--nproc", "2"}, "no program was given"},
        BadLine{"EmptyFolderToExplain", {"--explain", ""}, "--explain names no folder"},
        BadLine{"NoValue", {"--nproc"}, "--nproc has no value behind it"},
        BadLine{"NothingAfterDashes", {"--nproc", "2", "--"}, "no program was given"},
        BadLine{"NegativeRanks", {"--nproc", "-1", "--", "true"}, "--nproc -1 is out of range"},
        BadLine{"RanksInWords", {"--nproc", "two", "--", "true"}, "--nproc two is not a number"},
        BadLine{"UnknownFlag", {"--nproc", "1", "--nodes", "2", "--", "true"}, "--nodes"},
        BadLine{
            "NodeRankTooHigh",
            {"--nproc", "1", "--nnodes", "2", "--node-rank", "2", "--rdzv", "a:1", "--", "true"},
            "--node-rank 2 is out of range: 0 to 1"},
        BadLine{"NodesWithoutPlace",
                {"--nproc", "1", "--nnodes", "2", "--", "true"},
                "needs --rdzv HOST:PORT"},
        BadLine{"NoPort", {"--nproc", "1", "--rdzv", "localhost", "--", "true"}, "names no port"},
        BadLine{"BadPort", {"--nproc", "1", "--rdzv", "localhost:x", "--", "true"}, "has no port"},
        BadLine{"PortTooHigh",
                {"--nproc", "1", "--rdzv", "localhost:65536", "--", "true"},
                "has no port from 1 to 65535"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::testing
