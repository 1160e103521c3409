// Launchers of several nodes that have one command line, as torchrun's c10d has it.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "launcher.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;

/// A free port of loopback.
std::string FreePlace() {
  const int free = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(bind(free, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(free, reinterpret_cast<sockaddr*>(&address), &size);
  close(free);
  return "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
}

std::vector<std::string> Node(const std::string& place, const std::string& id = "job",
                              const std::string& ranks = "2", const std::string& timeout = "30") {
  return {"--nnodes",
          "2",
          "--nproc-per-node",
          ranks,
          "--rdzv-backend",
          "c10d",
          "--rdzv-endpoint",
          place,
          "--rdzv-id",
          id,
          "--timeout",
          timeout,
          "sh",
          "-c",
          "echo $RANK/$LOCAL_RANK/$WORLD_SIZE ${TESSERA_STORE_FD:+store}"};
}

TEST(LauncherNodes, AreNumberedAsTheyCome) {
  const auto place = FreePlace();
  Launcher one(Node(place));
  Launcher other(Node(place));
  auto first = one.wait();
  auto second = other.wait();
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(second.code, 0) << second.err;
  if (first.out.find("store") == std::string::npos) {
    std::swap(first, second);
  }
  EXPECT_CONTAINS(first.out, "0/0/4 store\n", "[rank 1] 1/1/4\n");
  EXPECT_CONTAINS(second.out, "[rank 2] 2/0/4\n", "[rank 3] 3/1/4\n");
}

TEST(LauncherNodes, TakeAnEmptyTimeoutForNone) {
  const std::vector<std::string> words{
      "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", FreePlace(), "true"};
  Launcher one(words, {{"TESSERA_TIMEOUT", ""}});
  std::this_thread::sleep_for(300ms);
  Launcher other(words, {{"TESSERA_TIMEOUT", ""}});
  EXPECT_EQ(one.wait().code, 0);
  EXPECT_EQ(other.wait().code, 0);
}

TEST(LauncherNodes, WaitForAHostThatIsNotKnownYet) {
  const auto result = Launcher({"--nnodes", "2", "--node-rank", "1", "--max-restarts", "1",
                                "--rdzv", "no-such-host.invalid:4711", "--timeout", "0.3", "true"})
                          .wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "no node 0 answered at no-such-host.invalid:4711 within 0.3 s: the ",
                  "host no-such-host.invalid of --rdzv cannot be resolved: ");
}

TEST(LauncherNodes, AnotherJobsLauncherIsNoNode) {
  const auto place = FreePlace();
  Launcher first(Node(place));
  std::this_thread::sleep_for(300ms);
  const auto stranger = Launcher(Node(place, "another", "2", "0.5")).wait();
  EXPECT_EQ(stranger.code, 2);
  EXPECT_CONTAINS(stranger.err, "no node 0 answered at " + place + " within 0.5 s: a job that ",
                  "already runs there did not begin again, or one with another --rdzv-id is there");
  EXPECT_EQ(Launcher(Node(place)).wait().code, 0);
  EXPECT_EQ(first.wait().code, 0);
}

TEST(LauncherNodes, AreRefusedWithOtherSizes) {
  const auto place = FreePlace();
  Launcher one(Node(place, "job", "2"));
  Launcher other(Node(place, "job", "3"));
  for (auto* launcher : {&one, &other}) {
    const auto result = launcher->wait();
    EXPECT_EQ(result.code, 2);
    EXPECT_CONTAINS(result.err, "one node has --nnodes 2 --nproc ", ": start all with the same\n");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(LauncherNodes, AreAnErrorAtTheTimeoutIfTheyDoNotCome) {
  const auto place = FreePlace();
  const auto alone = Launcher(Node(place, "job", "2", "0.5")).wait();
  EXPECT_EQ(alone.code, 2);
  EXPECT_CONTAINS(alone.err, "1 of 2 nodes came to " + place + " within 0.5 s: start the others");
  const auto elsewhere = Launcher(Node("192.0.2.1:4711", "job", "2", "0.5")).wait();
  EXPECT_EQ(elsewhere.code, 2);
  EXPECT_CONTAINS(elsewhere.err, "no node 0 answered at 192.0.2.1:4711 within 0.5 s");
  EXPECT_LT(elsewhere.took, 20s);
}

TEST(LauncherNodes, SaysForWhomItWaits) {
  const auto alone = Launcher(Node(FreePlace(), "job", "2", "3.5")).wait();
  EXPECT_CONTAINS(alone.err, "tessera-run: 1 of 2 nodes are at 127.0.0.1:");
}

/// A launcher of a job that may start again. `script` has the file $S, to which each start of rank
/// 0 has added its number of ranks.
std::vector<std::string> Again(const std::string& place, const TemporaryFolder& folder,
                               const std::string& nodes, const std::string& script,
                               const std::vector<std::string>& options = {}) {
  std::vector<std::string> words{"--nnodes",         nodes,
                                 "--nproc-per-node", "2",
                                 "--rdzv",           place,
                                 "--max-restarts",   "3",
                                 "--rdzv-conf",      "join_timeout=20,last_call_timeout=1"};
  words.insert(words.end(), options.begin(), options.end());
  const std::string starts = (folder / "starts").string();
  const std::string begin = "S='" + starts + "'; [ $RANK != 0 ] || echo $WORLD_SIZE >> $S; ";
  words.insert(words.end(), {"sh", "-c", begin + script});
  return words;
}
const std::vector<std::string> kAnyNumber{"--rdzv-backend", "c10d"};

/// Waits until rank 0 has begun.
const std::string kOnceBegun = "while [ ! -s $S ]; do sleep 0.05; done; ";

/// The two launchers of a job that may start again.
struct TwoNodes {
  explicit TwoNodes(const std::string& script, bool numbered = true)
      : one(Words(script, numbered, "0")), other(Words(script, numbered, "1")) {}
  std::vector<std::string> Words(const std::string& script, bool numbered,
                                 const std::string& number) const {
    return Again(place, folder, "2", script,
                 numbered ? std::vector<std::string>{"--node-rank", number} : kAnyNumber);
  }

  const TemporaryFolder folder;
  const std::string place = FreePlace();
  Launcher one;
  Launcher other;
};

TEST(LauncherNodes, BeginAgainTogether) {
  for (const bool numbered : {true, false}) {
    // The fourth rank fails in the first start, and the others would wait for ever.
    TwoNodes nodes(kOnceBegun +
                       "[ -e $S.failed ] && exit 0; [ $RANK = 3 ] || exec sleep 1000; "
                       "sleep 0.3; touch $S.failed; exit 5",
                   numbered);
    for (auto* launcher : {&nodes.one, &nodes.other}) {
      const auto result = launcher->wait();
      EXPECT_EQ(result.code, 0) << result.err;
      EXPECT_CONTAINS(result.err, "rank 3 (pid ", " exited with code 5; ending the ",
                      "starting the job again (restart 1 of 3)");
    }
    EXPECT_EQ(ReadFile(nodes.folder / "starts"), "4\n4\n");
  }
}

TEST(LauncherNodes, BeginWithTheLeastOfThemAfterTheLastCall) {
  const TemporaryFolder folder;
  const auto result = Launcher(Again(FreePlace(), folder, "1:2", "exit 0", kAnyNumber)).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_CONTAINS(result.err, "starting with 1 of 2 nodes");
  EXPECT_EQ(ReadFile(folder / "starts"), "2\n");
  EXPECT_GT(result.took, 1s);
}

TEST(LauncherNodes, GoOnWithoutOneThatIsGone) {
  const TemporaryFolder folder;
  const auto place = FreePlace();
  // All ranks fail once the other launcher is gone.
  const std::string gone = (folder / "gone").string();
  const auto words = Again(place, folder, "1:2",
                           kOnceBegun + "[ $(wc -l < $S) = 2 ] && exit 0; while [ ! -e '" + gone +
                               "' ]; do sleep 0.05; done; exit 4",
                           kAnyNumber);
  Launcher stays(words);
  std::this_thread::sleep_for(200ms);
  Launcher goes(words);
  WaitForFile(folder / "starts");
  kill(goes.pid(), SIGKILL);
  EXPECT_EQ(goes.wait().signal, SIGKILL);
  std::ofstream(gone).put('1');
  const auto result = stays.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(ReadFile(folder / "starts"), "4\n2\n");
  EXPECT_CONTAINS(result.err, "starting the job again (restart 1 of 3)",
                  "starting with 1 of 2 nodes");
}

TEST(LauncherNodes, AreRefusedWithTheSameNumber) {
  const TemporaryFolder folder;
  const auto place = FreePlace();
  Launcher zero(Again(place, folder, "3", "exit 0", {"--node-rank", "0"}));
  Launcher one(Again(place, folder, "3", "exit 0", {"--node-rank", "1"}));
  Launcher other(Again(place, folder, "3", "exit 0", {"--node-rank", "1"}));
  const auto result = zero.wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "two nodes have --node-rank 1: give each another");
  kill(one.pid(), SIGTERM);
  kill(other.pid(), SIGTERM);
  one.wait();
  other.wait();
}

/// A signal must have its default effect again in the meeting before a restart.
TEST(LauncherNodes, StopWaitingOnRequestBeforeARestart) {
  const TemporaryFolder folder;
  const auto words = Again(FreePlace(), folder, "2", "exec sleep 1000", kAnyNumber);
  Launcher stays(words);
  std::this_thread::sleep_for(200ms);
  Launcher goes(words);
  WaitForFile(folder / "starts");
  kill(goes.pid(), SIGKILL);
  goes.wait();
  while (stays.left_over(0ms).size() > 1) {  // ranks and guardian
    std::this_thread::sleep_for(10ms);
  }
  kill(stays.pid(), SIGTERM);
  EXPECT_EQ(stays.wait().signal, SIGTERM);
}

/// Ranks that save where another node has failed are no reason to miss the restart.
TEST(LauncherNodes, BeginAgainAlsoWhereTheRanksHaveSaved) {
  TwoNodes nodes(kOnceBegun +
                 "[ -e $S.failed ] && exit 0; trap 'exit 75' TERM; touch $S.$RANK; "
                 "while [ ! -e $S.0 -o ! -e $S.1 -o $RANK != 3 ]; do sleep 0.05; done; "
                 "touch $S.failed; exit 5");
  EXPECT_EQ(nodes.one.wait().code, 0);
  EXPECT_EQ(nodes.other.wait().code, 0);
  EXPECT_EQ(ReadFile(nodes.folder / "starts"), "4\n4\n");
}

/// What a process has computed, in ticks of 10 ms.
int TicksOf(pid_t pid) {
  std::istringstream fields(ReadFile("/proc/" + std::to_string(pid) + "/stat"));
  std::string skipped;
  for (int field = 1; field < 14; ++field) {
    fields >> skipped;
  }
  int user = 0;
  int system = 0;
  fields >> user >> system;
  return user + system;
}

/// The other node's last word must not keep the launcher busy, which only waits for its reader.
TEST(LauncherNodes, SleepWhileAReaderStalls) {
  TwoNodes nodes(
      "[ $RANK != 1 ] || head -c 600000 /dev/zero | tr '\\0' x | fold; "
      "[ $RANK -lt 2 ] || sleep 0.7");
  EXPECT_EQ(nodes.other.wait().code, 0);
  std::this_thread::sleep_for(500ms);
  EXPECT_LT(TicksOf(nodes.one.pid()), 15);
  EXPECT_EQ(nodes.one.wait().code, 0);
}

TEST(LauncherNodes, StopWaitingOnRequest) {
  Launcher alone(Node(FreePlace()));
  std::this_thread::sleep_for(300ms);
  kill(alone.pid(), SIGTERM);
  EXPECT_EQ(alone.wait().signal, SIGTERM);
}

}  // namespace
}  // namespace tessera::testing
