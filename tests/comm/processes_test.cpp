// Tests ranks that are processes: the rendezvous, and the errors of ranks whose peer dies.
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "group_of_all.h"
#include "testing/files.h"
#include "testing/processes.h"

namespace tessera::comm {
namespace {

using testing::Ended;
using testing::ProcessesOptions;
using testing::RunProcesses;

TEST(DISABLED_Processes, SumRanksInTwoWorldsInTurn) {
  for (int turn = 0; turn < 2; ++turn) {
    const WorldPtr world = world_from_environment();
    const at::Tensor value = at::full({1}, world->rank() + 1, at::kLong);
    group_of_all(*world)->all_reduce(value, ReduceOp::kSum)->wait();
    EXPECT_EQ(value.item<std::int64_t>(), world->size() * (world->size() + 1) / 2);
  }
}

TEST(DISABLED_Processes, OtherRanksMakeAGroupAfterRank0HasShutDown) {
  const WorldPtr world = world_from_environment();
  const WorldScope scope(world);
  if (world->rank() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    world->group({1, 2}, "late")->barrier();
  }
}

/// The processes 1 and 2 join as rank 1 of 2. Rank 0 serves the store until one of them has failed.
TEST(DISABLED_Processes, TwoJoinAsRank1) {
  const bool is_first = std::getenv("RANK") == std::string("0");
  setenv("RANK", is_first ? "0" : "1", 1);
  setenv("LOCAL_RANK", is_first ? "0" : "1", 1);
  try {
    const WorldPtr world = world_from_environment();
    while (is_first && !std::filesystem::exists(std::getenv("FAILED"))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  } catch (const Error& error) {
    std::ofstream(std::getenv("FAILED"));
    std::cerr << "error: " << error.what() << std::endl;
  }
}

/// Starts a thread that kills this process after `delay`.
void kill_after(std::chrono::microseconds delay) {
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    kill(getpid(), SIGKILL);
  }).detach();
}

/// Rank 1 is killed KILL_AFTER_US microseconds after it has made the process group; other ranks may
/// still be making the group.
TEST(DISABLED_Processes, Rank1IsKilledAnywhere) {
  const WorldPtr world = world_from_environment();
  const auto communicate = [&] {
    const CommunicatorPtr group = group_of_all(*world);
    if (world->rank() == 1) {
      kill_after(std::chrono::microseconds(std::atoi(std::getenv("KILL_AFTER_US"))));
    }
    while (true) {
      for (const std::int64_t elements : {1, 100'000, 3'000'000}) {
        const at::Tensor tensor = at::full({elements}, 1.0);
        group->all_reduce(tensor, ReduceOp::kAvg)->wait();
        EXPECT_EQ(tensor[elements - 1].item<float>(), 1.0F);
      }
    }
  };
  EXPECT_THROWN(PeerError, communicate(), "in group 'all' (ranks 0, 1, 2)");
}

TEST(DISABLED_Processes, Rendezvous) {
  try {
    world_from_environment();
    FAIL() << "no error";
  } catch (const Error& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
}

TEST(DISABLED_Processes, Warn) {
  const WorldPtr world = world_from_environment();
  for (int i = 0; i < 2; ++i) {
    TORCH_WARN("of all\nranks");
    if (world->rank() == 1) {
      TORCH_WARN("of one rank");
    }
  }
  group_of_all(*world)->barrier();
}

TEST(DISABLED_Processes, Rank1IsKilledAtTheRendezvous) {
  if (std::getenv("RANK") == std::string("1")) {
    kill_after(std::chrono::milliseconds(1500));
  }
  EXPECT_ERROR(world_from_environment(), "rank 0 of 3 waits at the rendezvous, but rank 1 (pid ",
               "has ended; look for that rank's error");
}

const ProcessesOptions kGloo{.environment = {{"TESSERA_SHM", "0"}}};

void expect_all_well(const std::vector<Ended>& processes) {
  for (const Ended& ended : processes) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
}

TEST(Processes, MeetThroughTheEnvironment) {
  expect_all_well(RunProcesses(3, "DISABLED_Processes.SumRanksInTwoWorldsInTurn"));
  ProcessesOptions gloo_by_name = kGloo;
  gloo_by_name.environment["MASTER_ADDR"] = "localhost";
  expect_all_well(RunProcesses(3, "DISABLED_Processes.SumRanksInTwoWorldsInTurn", gloo_by_name));
}

TEST(Processes, ReachTheStoreAfterRank0HasShutDown) {
  expect_all_well(
      RunProcesses(3, "DISABLED_Processes.OtherRanksMakeAGroupAfterRank0HasShutDown", kGloo));
}

TEST(Processes, RefuseASecondProcessWithTheSameRank) {
  const testing::TemporaryFolder folder;
  const auto processes = RunProcesses(3, "DISABLED_Processes.TwoJoinAsRank1",
                                      {.environment = {{"WORLD_SIZE", "2"},
                                                       {"LOCAL_WORLD_SIZE", "2"},
                                                       {"FAILED", (folder / "failed").string()}}});
  EXPECT_CONTAINS(processes[1].output + processes[2].output, "two processes have joined",
                  "as rank 1 of 2", "MASTER_PORT");
}

TEST(Processes, DetectAKilledRank) {
  // The time-out is ten minutes, so the test ends in time only if the ranks detect the lost rank.
  for (ProcessesOptions options : {ProcessesOptions(), kGloo}) {
    for (const char* delay : {"100", "1000", "3000", "10000", "40000"}) {
      options.environment["KILL_AFTER_US"] = delay;
      const auto ended = RunProcesses(3, "DISABLED_Processes.Rank1IsKilledAnywhere", options);
      EXPECT_EQ(ended[1].signal, SIGKILL) << ended[1].output;
      expect_all_well({ended[0], ended[2]});
    }
  }
}

std::vector<std::string> lines_with(const Ended& ended, const std::string& part) {
  std::vector<std::string> found;
  std::istringstream lines(ended.output);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(part) != std::string::npos) {
      found.push_back(line);
    }
  }
  return found;
}

TEST(Processes, NameAMissingRank) {
  // The time-out of 5 s is enough for rank 1 to start on a busy machine with a sanitizer.
  const auto processes = RunProcesses(
      2, "DISABLED_Processes.Rendezvous",
      {.environment = {{"WORLD_SIZE", "3"}, {"LOCAL_WORLD_SIZE", "3"}, {"TESSERA_TIMEOUT", "5"}}});
  expect_all_well(processes);
  EXPECT_CONTAINS(processes[0].output, "rank(s) 2 did not join");
  EXPECT_CONTAINS(processes[1].output, "rank(s) 2 did not join");
}

TEST(Processes, PrintEachWarningOnOneRank) {
  using Lines = std::vector<std::string>;
  const auto processes = RunProcesses(3, "DISABLED_Processes.Warn");
  expect_all_well(processes);
  Lines of_all;
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    const Lines lines = lines_with(processes[rank], "arning: of all");
    of_all.insert(of_all.end(), lines.begin(), lines.end());
    EXPECT_EQ(lines_with(processes[rank], "arning: of one"),
              rank == 1 ? Lines{"tessera: warning: of one rank [rank 1]"} : Lines{});
  }
  ASSERT_EQ(of_all.size(), 1U);
  EXPECT_CONTAINS(of_all[0], "tessera: warning: of all ranks [rank ");
}

TEST(Processes, NameTheRanksOfAMissingNode) {
  const std::string port = std::to_string(testing::free_port());
  const auto alone = RunProcesses(1, "DISABLED_Processes.Rendezvous",
                                  {.environment = {{"WORLD_SIZE", "2"},
                                                   {"LOCAL_WORLD_SIZE", "1"},
                                                   {"MASTER_PORT", port},
                                                   {"TESSERA_TIMEOUT", "2"}}});
  EXPECT_CONTAINS(alone[0].output,
                  "tessera: rank 0 waits for rank 1 of 2 at 127.0.0.1:" + port +
                      ", as RANK and WORLD_SIZE of tessera-run or torchrun say\n",
                  "rank(s) 1 did not join",
                  "comes from RANK and WORLD_SIZE of tessera-run or torchrun");
}

TEST(Processes, NameAnUnknownHost) {
  const auto alone = RunProcesses(1, "DISABLED_Processes.Rendezvous",
                                  {.environment = {{"WORLD_SIZE", "2"},
                                                   {"MASTER_ADDR", "no-such-host.invalid"},
                                                   {"TESSERA_TIMEOUT", "0.3"}}});
  EXPECT_CONTAINS(alone[0].output, "MASTER_ADDR=no-such-host.invalid", "the host is unknown: ");
}

TEST(Processes, NameARankKilledAtTheRendezvous) {
  const auto processes =
      RunProcesses(2, "DISABLED_Processes.Rank1IsKilledAtTheRendezvous",
                   {.environment = {{"WORLD_SIZE", "3"}, {"LOCAL_WORLD_SIZE", "3"}}});
  EXPECT_EQ(processes[0].exit_code, 0) << processes[0].output;
}

/// A listening socket that the launcher opens and the job's processes inherit.
class InheritedListener {
 public:
  InheritedListener() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    const bool listening = bind(fd_, any, length) == 0 && listen(fd_, SOMAXCONN) == 0 &&
                           getsockname(fd_, any, &length) == 0;
    TESSERA_CHECK(listening, "no listening socket");
    port_ = ntohs(address.sin_port);
  }
  InheritedListener(const InheritedListener&) = delete;
  InheritedListener& operator=(const InheritedListener&) = delete;
  ~InheritedListener() { close(fd_); }

  std::string fd() const { return std::to_string(fd_); }
  std::string port() const { return std::to_string(port_); }

 private:
  int fd_;
  int port_ = 0;
};

TEST(Processes, MeetOnTheLaunchersSocket) {
  const InheritedListener listener;
  expect_all_well(RunProcesses(
      2, "DISABLED_Processes.SumRanksInTwoWorldsInTurn",
      {.environment = {{"MASTER_PORT", listener.port()}, {"TESSERA_STORE_FD", listener.fd()}}}));
}

TEST(Processes, NameAPortInUse) {
  const InheritedListener listener;
  const auto processes =
      RunProcesses(2, "DISABLED_Processes.Rendezvous",
                   {.environment = {{"MASTER_PORT", listener.port()}, {"TESSERA_TIMEOUT", "1"}}});
  expect_all_well(processes);
  EXPECT_CONTAINS(processes[0].output,
                  "MASTER_PORT=" + listener.port() + ": Address already in use");
}

}  // namespace
}  // namespace tessera::comm
