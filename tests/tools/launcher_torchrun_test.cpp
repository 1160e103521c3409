// torchrun's names: its options, and the variables PET_... What torchrun itself makes of a command
// line is compared in tests/examples/launchers/test_torchrun.py.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "launcher.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

std::string Printed(const std::vector<std::string>& arguments,
                    const Launcher::Variables& variables = {}) {
  const auto result = Launcher(arguments, variables).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  return result.out;
}

// What rank 1 of 2 prints on the second of two nodes.
constexpr const char* kSecondNode = "[rank 1] 1 2 node0 4711\n";
const std::vector<std::string> kPrint{"sh", "-c",
                                      "echo $RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT"};

std::string PrintedRanks(std::vector<std::string> options,
                         const Launcher::Variables& variables = {}) {
  options.insert(options.end(), kPrint.begin(), kPrint.end());
  return Printed(options, variables);
}

TEST(LauncherTorchrun, TakesItsOptionsWithDashesAndUnderscores) {
  EXPECT_EQ(PrintedRanks({"--nnodes", "2", "--nproc-per-node", "1", "--node-rank", "1",
                          "--master-addr", "node0", "--master-port", "4711"}),
            kSecondNode);
  EXPECT_EQ(
      PrintedRanks({"--nnodes=2", "--nproc_per_node=1", "--node_rank=1", "--master_addr=node0",
                    "--master_port=4711", "--max_restarts=0", "--monitor_interval", "5"}),
      kSecondNode);
  EXPECT_EQ(PrintedRanks({"--nnodes", "2:2", "--rdzv_backend", "c10d", "--rdzv-endpoint",
                          "node0:4711", "--rdzv-id", "x", "--node-rank", "1", "--no-python"}),
            kSecondNode);
}

TEST(LauncherTorchrun, TakesItsVariablesBelowOptions) {
  const Launcher::Variables node{{"PET_NNODES", "2"},         {"PET_NODE_RANK", "1"},
                                 {"PET_NPROC_PER_NODE", "1"}, {"PET_MASTER_ADDR", "node0"},
                                 {"PET_MASTER_PORT", "4711"}, {"PET_MAX_RESTARTS", "0"}};
  EXPECT_EQ(PrintedRanks({}, node), kSecondNode);
  EXPECT_CONTAINS(PrintedRanks({"--nproc", "2"}, node), "[rank 2] 2 4 node0 4711\n",
                  "[rank 3] 3 4 node0 4711\n");
  EXPECT_EQ(PrintedRanks({"--nnodes", "3", "--node_rank=2"}, node), "[rank 2] 2 3 node0 4711\n");
  auto endpoint = node;
  endpoint["PET_RDZV_ENDPOINT"] = "other:1";
  EXPECT_EQ(PrintedRanks({}, endpoint), "[rank 1] 1 2 other 1\n");
  auto empty = node;
  empty["PET_MASTER_PORT"] = "";
  EXPECT_EQ(PrintedRanks({}, empty), "[rank 1] 1 2 node0 29500\n");
}

TEST(LauncherTorchrun, IsOneRankWhereNothingIsSaid) {
  EXPECT_EQ(Printed({"sh", "-c", "echo $RANK/$WORLD_SIZE"}), "0/1\n");
}

TEST(LauncherTorchrun, StandaloneLeavesPlacesOut) {
  const auto out = PrintedRanks({"--standalone"}, {{"PET_RDZV_ENDPOINT", "192.0.2.1:1"}});
  EXPECT_CONTAINS(out, "0 1 127.0.0.1 ");
  EXPECT_CONTAINS(PrintedRanks({}, {{"PET_STANDALONE", "1"}, {"PET_MASTER_ADDR", "192.0.2.1"}}),
                  "0 1 127.0.0.1 ");
  EXPECT_CONTAINS(
      Launcher({"true"}, {{"PET_STANDALONE", "0"}, {"PET_MASTER_ADDR", "192.0.2.1"}}).wait().err,
      "192.0.2.1 is not an address of this machine");
}

TEST(LauncherTorchrun, AProgramNeedsNoDashesBeforeIt) {
  EXPECT_EQ(Printed({"--nproc_per_node", "1", "printf", "<%s>", "--nnodes", "--", "-m", "a_b"}),
            "<--nnodes><--><-m><a_b>");
  EXPECT_EQ(Printed({"-r0", "--", "printf", "<%s>", "--", "x"}), "<--><x>");
}

TEST(LauncherTorchrun, C10dUsesADifferentPort) {
  EXPECT_EQ(PrintedRanks({"--nnodes", "2", "--node-rank", "1", "--rdzv-backend", "c10d",
                          "--rdzv-endpoint", "[::1]"}),
            "[rank 1] 1 2 ::1 29400\n");
}

TEST(LauncherTorchrun, AnIdKeepsJobsOfSeveralNodesApart) {
  const auto token = [](const std::vector<std::string>& options,
                        const Launcher::Variables& variables) {
    std::vector<std::string> line{"--nnodes", "2", "--node-rank", "1", "--rdzv", "a:1"};
    line.insert(line.end(), options.begin(), options.end());
    line.insert(line.end(), {"sh", "-c", "echo TOKEN=$TESSERA_JOB_TOKEN"});
    return ValueOf(Printed(line, variables), "[rank 1] TOKEN");
  };
  EXPECT_EQ(token({"--rdzv-id", "job7"}, {}), "job7");
  EXPECT_EQ(token({}, {{"PET_RDZV_ID", "job8"}}), "job8");
  EXPECT_EQ(token({}, {}), "");
}

TEST(LauncherTorchrun, RestartsAsMaxRestartsSays) {
  const TemporaryFolder folder;
  const auto result = Launcher({"--max-restarts", "1", "sh", "-c", "echo >> $DIR/starts; exit 3"},
                               {{"DIR", folder.path()}})
                          .wait();
  EXPECT_EQ(result.code, 3);
  EXPECT_EQ(ReadFile(folder / "starts"), "\n\n");
}

struct Refused {
  const char* name;
  std::vector<std::string> arguments;
  Launcher::Variables variables;
  const char* message;
};

class LauncherTorchrunRefusal : public ::testing::TestWithParam<Refused> {};

TEST_P(LauncherTorchrunRefusal, IsOneLine) {
  auto arguments = GetParam().arguments;
  arguments.emplace_back("true");
  const auto result = Launcher(arguments, GetParam().variables).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, GetParam().message);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

INSTANTIATE_TEST_SUITE_P(
    All, LauncherTorchrunRefusal,
    ::testing::Values(
        Refused{
            "Range", {"--nnodes", "3:2"}, {}, "--nnodes 3:2 has more nodes at least than at most"},
        Refused{"HalfARange", {}, {{"PET_NNODES", "1:"}}, "PET_NNODES=1: is not a number from 1"},
        Refused{"Words", {}, {{"PET_NNODES", "two"}}, "PET_NNODES=two is not a number from 1"},
        Refused{"Zero", {"--nnodes", "0"}, {}, "--nnodes 0 is out of range"},
        Refused{"Module", {"-m"}, {}, "--module is torchrun's alone; tessera-run starts programs"},
        Refused{"ModuleInVariable", {}, {{"PET_MODULE", "1"}}, "PET_MODULE=1 is torchrun's alone"},
        Refused{"Configuration",
                {"--rdzv_conf", "join_timeout=3,read_timeout=3"},
                {},
                "has the key 'read_timeout', which is torchrun's alone"},
        Refused{"ConfigurationInVariable",
                {},
                {{"PET_RDZV_CONF", "last_call_timeout"}},
                "PET_RDZV_CONF=last_call_timeout is no number of seconds"},
        Refused{"Backend", {"--rdzv-backend", "etcd"}, {}, "give static or c10d"},
        Refused{"PortOfSeveral",
                {"--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:0", "--node-rank",
                 "1"},
                {},
                "has no port from 1"},
        Refused{"StandaloneOfSeveral",
                {"--standalone", "--nnodes", "2"},
                {},
                "--standalone is for one node, but --nnodes is 2"},
        Refused{"Gpu", {"--nproc-per-node", "gpu"}, {{"CUDA_VISIBLE_DEVICES", ""}}, "has no GPU"},
        Refused{"Xpu", {"--nproc-per-node", "xpu"}, {}, "--nproc xpu is not a number"},
        Refused{"Streams", {"--tee", "0:4"}, {}, "--tee 0:4 is neither"},
        Refused{"Filter", {"--local-ranks-filter", "0,x"}, {}, "is no list of local ranks"},
        Refused{"FilterOfNoRank",
                {"--local-ranks-filter", "1"},
                {},
                "--local-ranks-filter 1 names local rank 1, and this node's are 0 to 0"},
        Refused{"StreamsOfNoRank", {"--tee", "2:3"}, {}, "--tee 2:3 names local rank 2"},
        Refused{"StreamsTwice", {"--redirects", "0:3,0:1"}, {}, "names local rank 0 twice"},
        Refused{"TooManyRanks",
                {"--nnodes", "1000000", "--nproc", "4096", "--rdzv", "a:1"},
                {},
                "--nnodes 1000000 of --nproc 4096 are more than 2147483647 ranks"},
        Refused{"EndlessTimeout", {"--timeout", "inf"}, {}, "inf is no number of seconds above 0"},
        Refused{"LongTimeout",
                {},
                {{"TESSERA_TIMEOUT", "2e6"}},
                "TESSERA_TIMEOUT=2e6 is no number of seconds above 0 to 1000000"},
        Refused{"LongConfiguration",
                {"--rdzv-conf", "join_timeout=1e300"},
                {},
                "is no number of seconds from 0 to 1000000"},
        Refused{"NoHost", {"--rdzv", ":29500"}, {}, "--rdzv :29500 names no host"},
        Refused{"EmptyHost", {"--master-addr", ""}, {}, "--master-addr names no host"},
        Refused{"EmptyLogFolder", {"--log-dir", ""}, {}, "--log-dir names no folder"}),
    [](const auto& info) { return info.param.name; });

TEST(LauncherTorchrun, SaysHowToStartAScript) {
  const auto result = Launcher({"no_such_train.py"}).wait();
  EXPECT_EQ(result.code, 127);
  EXPECT_CONTAINS(result.err, "write python3 no_such_train.py");
}

// The host becomes known only when the lookup is tried again.
TEST(LauncherTorchrun, WaitsForANameThatIsNotKnownYet) {
  const TemporaryFolder folder;
  const auto result = Launcher({"--master-addr", "late-name", "--master-port", "0", "echo", "up"},
                               {{"LD_PRELOAD", LATE_NAME}, {"LATE_NAME", folder / "asked"}})
                          .wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "up\n");
  EXPECT_CONTAINS(result.err, "waits for the host late-name of --rdzv to be known, 60 s at most");
}

TEST(LauncherTorchrun, WaitsNoLongerThanTheTimeout) {
  const auto result =
      Launcher({"--timeout", "0.3", "--master-addr", "no-such-host.invalid", "true"}).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "the host no-such-host.invalid of --rdzv cannot be resolved");
}

}  // namespace
}  // namespace tessera::testing
