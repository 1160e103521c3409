#include <gtest/gtest.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>

#include "launcher.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

// Each rank says that it is up by a file named after it.
class LauncherSignal : public ::testing::Test {
 protected:
  std::vector<std::string> Job(int ranks, const std::string& script,
                               const std::string& prepare = ":") {
    return Shell(ranks, prepare + "; : > '" + (folder_ / "up").string() + "'.$RANK; " + script);
  }
  void WaitForRanks(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      WaitForFile((folder_ / "up").string() + "." + std::to_string(rank));
    }
  }

  TemporaryFolder folder_;
};

class LauncherStop : public LauncherSignal, public ::testing::WithParamInterface<int> {};

TEST_P(LauncherStop, EndsTheJob) {
  Launcher launcher(Job(3, "sleep 1000 & setsid sleep 1000 & wait"));
  WaitForRanks(3);
  kill(launcher.pid(), GetParam());
  EXPECT_EQ(launcher.wait().code, 128 + GetParam());
  EXPECT_TRUE(launcher.left_over().empty());
}

INSTANTIATE_TEST_SUITE_P(All, LauncherStop, ::testing::Values(SIGINT, SIGTERM, SIGHUP, SIGQUIT),
                         [](const auto& info) {
                           return std::string("SIG") + sigabbrev_np(info.param);
                         });

TEST_F(LauncherSignal, LetsRanksEndInOrder) {
  Launcher launcher(Job(2, "while :; do sleep 0.05; done", "trap 'echo saved; exit 0' TERM"));
  WaitForRanks(2);
  kill(launcher.pid(), SIGTERM);
  const auto result = launcher.wait();
  EXPECT_CONTAINS(result.out, "saved\n");
  EXPECT_CONTAINS(result.out, "[rank 1] saved\n");
}

TEST_F(LauncherSignal, KillsAtOnceAtTheSecondSignal) {
  const auto told = (folder_ / "told").string();
  Launcher launcher(Job(2, "while :; do sleep 0.05; done", "trap ': > " + told + "' INT"));
  WaitForRanks(2);
  kill(launcher.pid(), SIGINT);
  WaitForFile(told);
  kill(launcher.pid(), SIGINT);
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 128 + SIGINT);
  EXPECT_EQ(result.err.find("have not ended"), std::string::npos) << "waited for the time-out";
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST_F(LauncherSignal, KillsRanksThatIgnoreTheStop) {
  Launcher launcher(Job(2, "while :; do sleep 0.05; done", "trap '' INT"));
  WaitForRanks(2);
  kill(launcher.pid(), SIGINT);
  EXPECT_EQ(launcher.wait().code, 128 + SIGINT);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST_F(LauncherSignal, GivesRanksTheGraceThatWasAskedFor) {
  const auto job = [&](const std::string& grace) {
    auto arguments =
        Job(1, "while :; do sleep 0.05; done", "trap 'sleep 1; echo saved; exit 0' TERM");
    arguments.insert(arguments.begin(), {"--grace", grace});
    return arguments;
  };
  for (const auto& [grace, saved] : {std::pair("0.2", false), std::pair("30", true)}) {
    Launcher launcher(job(grace));
    WaitForRanks(1);
    std::filesystem::remove((folder_ / "up").string() + ".0");
    kill(launcher.pid(), SIGTERM);
    const auto result = launcher.wait();
    EXPECT_EQ(result.out, saved ? "saved\n" : "") << grace;
    EXPECT_EQ(result.err.find("killing the ranks that have not ended") == std::string::npos, saved);
    EXPECT_LT(result.took.count(), 10);
  }
}

TEST_F(LauncherSignal, SaysThatTheJobHasSaved) {
  Launcher launcher(Job(2, "while :; do sleep 0.05; done", "trap 'exit 75' TERM"));
  WaitForRanks(2);
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.wait().code, 75);
}

TEST_F(LauncherSignal, SaysThatTheJobHasSavedWhereOtherRanksHadEndedWell) {
  Launcher launcher(
      Job(2, "[ $RANK = 0 ] || exit 0; while :; do sleep 0.05; done", "trap 'exit 75' TERM"));
  WaitForRanks(2);
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.wait().code, 75);
}

// Rank 0 asks the launcher to stop as soon as that has noticed the end of rank 1.
TEST_F(LauncherSignal, ReportsAFailureJustBeforeTheStop) {
  const auto pid = (folder_ / "pid").string();
  const auto result =
      Launcher(Job(2, "[ $RANK = 0 ] || { echo $$ > " + pid + ".new; mv " + pid + ".new " + pid +
                          "; exit 3; }; while [ ! -e " + pid + " ]; do :; done; P=$(cat " + pid +
                          "); while kill -0 $P 2>&-; do :; done; kill -TERM $PPID; sleep 1000"))
          .wait();
  EXPECT_EQ(result.code, 128 + SIGTERM);
  EXPECT_CONTAINS(result.err, ") exited with code 3; ending the other ranks\n",
                  "tessera-run: got SIGTERM, ending the job\n");
}

// bash -c "tessera-run ... > >(tee log)" becomes the launcher, whose child tee is then.
TEST_F(LauncherSignal, SparesChildrenFromBeforeItsExec) {
  const auto result = Launcher({"bash", "-c",
                                "bash -c 'sleep 1000 & echo $! > $DIR/pid; exec $RUN true'; "
                                "kill -0 $(cat $DIR/pid) && echo spared"},
                               {{"RUN", TESSERA_RUN}, {"DIR", folder_.path()}})
                          .wait();
  EXPECT_EQ(result.out, "spared\n") << result.err;
}

TEST_F(LauncherSignal, PassesUserSignalsOn) {
  Launcher launcher(Job(1, "while :; do sleep 0.05; done", "trap 'echo noted; exit 0' USR1"));
  WaitForRanks(1);
  kill(launcher.pid(), SIGUSR1);
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "noted\n");
}

TEST_F(LauncherSignal, LeavesNothingWhenItIsKilled) {
  Launcher launcher(Job(3, "sleep 1000 & sleep 1000", "trap '' HUP INT TERM"));
  WaitForRanks(3);
  kill(launcher.pid(), SIGKILL);
  EXPECT_EQ(launcher.wait().signal, SIGKILL);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST_F(LauncherSignal, LeavesNoEmptyFolderWhenItIsKilled) {
  Launcher launcher({"sh", "-c", ": > " + (folder_ / "up").string() + "; sleep 1000"},
                    {{"TMPDIR", folder_.path()}});
  WaitForFile(folder_ / "up");
  kill(launcher.pid(), SIGKILL);
  launcher.wait();
  EXPECT_TRUE(launcher.left_over().empty());
  std::filesystem::remove(folder_ / "up");
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(LauncherSignal, EndsTheJobWhenARankIsKilled) {
  Launcher launcher(Job(4, "echo $$ > '" + (folder_ / "pid").string() + "'.$RANK; sleep 1000"));
  WaitForRanks(4);
  const auto file = (folder_ / "pid").string() + ".2";
  while (ReadFile(file).find('\n') == std::string::npos) {
    usleep(5'000);
  }
  kill(std::stoi(ReadFile(file)), SIGKILL);
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 128 + SIGKILL);
  EXPECT_CONTAINS(result.err, "rank 2 (pid ");
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST_F(LauncherSignal, DoesNotWaitForAReaderThatStalls) {
  Launcher launcher(Job(2,
                        "[ $RANK = 0 ] || { sleep 0.5; exit 6; }; "
                        "while :; do echo 0123456789012345678901234567890123456789 >&2; done"));
  WaitForRanks(2);
  // No byte was read: the launcher and its guardian stay to deliver the output.
  while (launcher.left_over(std::chrono::milliseconds(0)).size() > 2) {
    usleep(5'000);
  }
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 6);
  EXPECT_CONTAINS(result.err, "rank 1 (pid ");
}

TEST_F(LauncherSignal, OutlivesItsReader) {
  Launcher launcher(
      Job(2, "for i in $(seq 1 50); do [ $RANK = 0 ] || echo text; sleep 0.01; done"));
  launcher.stop_reading();
  EXPECT_EQ(launcher.wait().code, 0);
}

// What a person at a terminal sees: rank 0 has the terminal, and Ctrl-C ends everything.
TEST(LauncherTerminal, IsRankZerosAndTakesCtrlC) {
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    execl(TESSERA_RUN, TESSERA_RUN, "--nproc", "2", "--", "sh", "-c",
          "test -t 1 && echo rank $RANK has a terminal; sleep 1000", nullptr);
    _exit(99);
  }
  std::string seen;
  char buffer[256];
  bool typed = false;
  for (ssize_t size; (size = read(terminal, buffer, sizeof buffer)) > 0;) {
    seen.append(buffer, static_cast<std::size_t>(size));
    if (!typed && seen.find("rank 0 has a terminal") != std::string::npos) {
      typed = write(terminal, "\x03", 1) == 1;
    }
  }
  int status = 0;
  waitpid(pid, &status, 0);
  close(terminal);
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT) << seen;
  EXPECT_EQ(seen.find("rank 1 has a terminal"), std::string::npos) << seen;
}

}  // namespace
}  // namespace tessera::testing
