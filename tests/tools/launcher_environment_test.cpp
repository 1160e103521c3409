#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <thread>

#include "launcher.h"
#include "testing/errors.h"

namespace tessera::testing {
namespace {

std::string OutputOf(const Result& result) {
  EXPECT_EQ(result.code, 0) << result.err;
  return result.out;
}

std::string Environment(std::vector<std::string> options, Launcher::Variables variables = {}) {
  options.insert(options.end(), {"--", "env"});
  return OutputOf(Launcher(options, variables).wait());
}

TEST(LauncherEnvironment, NamesRankAndWorld) {
  const auto out = OutputOf(RunShell(3, "echo $RANK/$LOCAL_RANK/$WORLD_SIZE/$LOCAL_WORLD_SIZE"));
  for (const char* line : {"0/0/3/3\n", "[rank 1] 1/1/3/3\n", "[rank 2] 2/2/3/3\n"}) {
    EXPECT_CONTAINS(out, line);
  }
}

TEST(LauncherEnvironment, MeetsOnLoopbackByDefault) {
  const auto environment = Environment({"--nproc", "1"});
  EXPECT_EQ(ValueOf(environment, "MASTER_ADDR"), "127.0.0.1");
  EXPECT_GT(std::stoi(ValueOf(environment, "MASTER_PORT")), 0);
}

TEST(LauncherEnvironment, NumbersTheRanksOfASecondNode) {
  const auto environment = Environment(
      {"--nproc", "1", "--nnodes", "3", "--node-rank", "2", "--rdzv", "192.0.2.7:4711"});
  EXPECT_EQ(ValueOf(environment, "[rank 2] RANK"), "2");
  EXPECT_EQ(ValueOf(environment, "[rank 2] LOCAL_RANK"), "0");
  EXPECT_EQ(ValueOf(environment, "[rank 2] WORLD_SIZE"), "3");
  EXPECT_EQ(ValueOf(environment, "[rank 2] LOCAL_WORLD_SIZE"), "1");
  EXPECT_EQ(ValueOf(environment, "[rank 2] MASTER_ADDR"), "192.0.2.7");
  EXPECT_EQ(ValueOf(environment, "[rank 2] MASTER_PORT"), "4711");
  EXPECT_EQ(ValueOf(environment, "[rank 2] TESSERA_STORE_FD"), "(none)");
}

TEST(LauncherEnvironment, GivesMoreRanksThanCoresOneThreadEach) {
  const int ranks = static_cast<int>(std::thread::hardware_concurrency()) + 1;
  const auto out = OutputOf(
      RunShell(ranks, "echo OMP=$OMP_NUM_THREADS", {{"OMP_NUM_THREADS", ""}, {"UNRELATED", "1"}}));
  EXPECT_EQ(ValueOf(out, "OMP"), "1");
}

TEST(LauncherEnvironment, KeepsGivenOmpNumThreads) {
  EXPECT_EQ(ValueOf(Environment({"--nproc", "1"}, {{"OMP_NUM_THREADS", "7"}}), "OMP_NUM_THREADS"),
            "7");
}

TEST(LauncherEnvironment, StartsARankForEachGpuOrCore) {
  const auto size = [](const char* visible) {
    return ValueOf(Environment({"--nproc", "auto"}, {{"CUDA_VISIBLE_DEVICES", visible}}),
                   "WORLD_SIZE");
  };
  EXPECT_EQ(size("0,2,5"), "3");
  EXPECT_EQ(size("0,1,"), "2");
  EXPECT_EQ(size("0,-1,1"), "1");
  EXPECT_EQ(size("GPU-8932f937, MIG-7"), "2");
  EXPECT_EQ(size("-1"), std::to_string(std::thread::hardware_concurrency()));
  EXPECT_EQ(size("NoDevFiles"), std::to_string(std::thread::hardware_concurrency()));
  EXPECT_CONTAINS(Launcher({"--nproc", "many", "--", "true"}).wait().err, "--nproc", "many");
}

TEST(LauncherEnvironment, GivesItsInputToTheFirstRank) {
  const std::string run = std::string("printf 'one\\ntwo\\n' | ") + TESSERA_RUN +
                          " --nproc 2 -- sh -c 'echo $RANK $(cat)'";
  FILE* pipe = popen(run.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string out;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    out.push_back(static_cast<char>(c));
  }
  EXPECT_EQ(pclose(pipe), 0);
  EXPECT_CONTAINS(out, "0 one two\n", "[rank 1] 1\n");
}

TEST(LauncherEnvironment, PassesOtherVariablesOn) {
  EXPECT_EQ(ValueOf(Environment({"--nproc", "1"}, {{"SOME_WORD", "a=b c"}}), "SOME_WORD"), "a=b c");
}

TEST(LauncherEnvironment, OverridesAnOuterJobs) {
  const auto environment =
      Environment({"--nproc", "1"}, {{"RANK", "9"}, {"WORLD_SIZE", "16"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(ValueOf(environment, "RANK"), "0");
  EXPECT_EQ(ValueOf(environment, "WORLD_SIZE"), "1");
  EXPECT_NE(ValueOf(environment, "MASTER_PORT"), "1");
}

TEST(LauncherEnvironment, LeavesOutTheStoreOfAnOuterTorchrun) {
  const auto environment = Environment({"--nproc", "1"}, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                          {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(ValueOf(environment, "TORCHELASTIC_USE_AGENT_STORE"), "(none)");
  EXPECT_EQ(ValueOf(environment, "TORCHELASTIC_RESTART_COUNT"), "(none)");
}

TEST(LauncherEnvironment, TokenIsTheJobs) {
  const auto out = OutputOf(RunShell(2, "echo TOKEN=$TESSERA_JOB_TOKEN"));
  const auto token = ValueOf(out, "TOKEN");
  EXPECT_EQ(token.size(), 32U);
  EXPECT_EQ(ValueOf(out, "[rank 1] TOKEN"), token);
  EXPECT_NE(ValueOf(OutputOf(RunShell(1, "echo TOKEN=$TESSERA_JOB_TOKEN")), "TOKEN"), token);
}

TEST(LauncherEnvironment, HandsRankZeroTheListeningSocket) {
  const auto out = OutputOf(Launcher({"--nproc", "1", "--", STORE_PROBE}).wait());
  EXPECT_EQ(ValueOf(out, "listening"), "1");
  EXPECT_EQ(ValueOf(out, "store"), "127.0.0.1:" + ValueOf(out, "port"));
}

TEST(LauncherEnvironment, HandsTheSocketToNoOtherRank) {
  const auto out = OutputOf(
      RunShell(2, "echo STORE=$TESSERA_STORE_FD; ls -l /proc/$$/fd | grep -c socket || true"));
  EXPECT_CONTAINS(out, "[rank 1] STORE=\n", "[rank 1] 0\n");
}

TEST(LauncherEnvironment, PassesArgumentsUnchanged) {
  const auto out = OutputOf(
      Launcher({"--nproc", "1", "--", "printf", "<%s>", "a b", "--nproc", "", "--", "*"}).wait());
  EXPECT_EQ(out, "<a b><--nproc><><--><*>");
}

/// Not by reading it: as root, a careless program may have put a file in the device's place.
TEST(LauncherEnvironment, RanksReadNothingFromStandardInput) {
  EXPECT_EQ(OutputOf(RunShell(1, "readlink /proc/self/fd/0")), "/dev/null\n");
}

}  // namespace
}  // namespace tessera::testing
