// Tests jobs that hang: the reports of the waiting ranks must soon name the missing ranks.
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <unistd.h>

#include <iostream>
#include <list>
#include <map>
#include <regex>
#include <thread>

#include "group_of_all.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/detail/flight_record.h"
#include "testing/files.h"
#include "testing/processes.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::Ended;
using testing::RunProcesses;

/// Returns a world with NCCL if HANGS_ON_NCCL is set; otherwise, a world for CPU tensors.
WorldPtr make_world() {
  WorldOptions options;
  if (std::getenv("HANGS_ON_NCCL") != nullptr) {
    options.device = "cuda";
    options.backend = "nccl";
  }
  return world_from_environment(options);
}

at::Tensor zeros(const World& world, std::int64_t count) {
  const bool on_gpu = world.options().device == "cuda";
  return at::zeros({count}, at::Device(on_gpu ? at::kCUDA : at::kCPU,
                                       static_cast<c10::DeviceIndex>(world.device_index())));
}

void sum(const World& world, Communicator& group) {
  const at::Tensor tensor = zeros(world, 4);
  group.all_reduce(tensor, ReduceOp::kSum)->wait();
  tensor.cpu();
}

CommunicatorPtr take_steps(World& world) {
  CommunicatorPtr group = group_of_all(world);
  for (int step = 1; step <= 3; ++step) {
    sum(world, *group);
    world.set_step(step);
  }
  return group;
}

/// Expects that `call` throws a PeerError, and prints its message and the waiting time, which
/// error_of() reads. If `call` waits for a device, the watchdog ends the process instead.
template <class Call>
void expect_peer_error(Call&& call) {
  const auto begun = steady_clock::now();
  std::cout << "waits from " << begun.time_since_epoch() / milliseconds(1) << " ms" << std::endl;
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const PeerError& error) {
    const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begun);
    std::cout << "error after " << waited.count() << " ms: " << error.what() << std::endl;
  }
}

/// A fault: rank 1 calls `act` while ranks 0 and 2 call the all-reduce of step 4.
struct Fault {
  const char* name;
  enum When { kAtOnce, kAtTheTimeOut } when;
  std::vector<const char*> report;  ///< `report`: texts in the watchdog's report
  std::vector<const char*> errors;  ///< `errors`: texts in the errors of ranks 0 and 2
  void (*act)(World& world);
};

const std::vector<Fault>& faults() {
  using enum Fault::When;
  static const std::vector<Fault> table = {
      {"Ends", kAtOnce, {}, {"rank 1 ended", "after step 3", "save_hugging_face"}, [](World&) {}},
      {"ExitsWithACode",
       kAtOnce,
       {},
       {"rank 1 died", "after step 3; look for its error"},
       [](World&) { std::exit(3); }},
      {"Throws",
       kAtOnce,
       {},
       {"rank 1 gave up", "after step 3"},
       [](World& world) {
         world.abort();
         std::this_thread::sleep_for(seconds(2));
       }},
      {"CallsAnother",
       kAtTheTimeOut,
       {"rank(s) 1 did not arrive for",
        "rank 1 waits in set-up (call 0 of group 'pair'), called by full_tensor"},
       {},
       [](World& world) {
         const CallerScope caller("full_tensor");
         expect_peer_error([&] { world.group({0, 1}, "pair"); });
       }},
      {"Sleeps",
       kAtTheTimeOut,
       {"save_hugging_face", "rank(s) 1 did not arrive for",
        "rank 1 is outside of collectives, after all_reduce (call 3 of group 'all')"},
       {"rank(s) 1 did not arrive for ", "rank 1 is outside of collectives"},
       [](World&) { std::this_thread::sleep_for(seconds(7)); }},
      {"IsStopped",
       kAtTheTimeOut,
       {"rank(s) 1 did not arrive for"},
       {"rank(s) 1 did not arrive for"},
       [](World&) { raise(SIGSTOP); }},
  };
  return table;
}

TEST(DISABLED_Hangs, Rank1) {
  const WorldPtr world = make_world();
  const CommunicatorPtr group = take_steps(*world);
  if (world->rank() == 1) {
    std::ranges::find(faults(), std::string(std::getenv("HANGS_FAULT")), &Fault::name)->act(*world);
  } else {
    const CallerScope caller("save_hugging_face");
    expect_peer_error([&] { sum(*world, *group); });
  }
}

TEST(DISABLED_Hangs, Rank1IsSlow) {
  const WorldPtr world = make_world();
  const CommunicatorPtr group = take_steps(*world);
  if (world->rank() == 1) {
    std::this_thread::sleep_for(milliseconds(2500));
  }
  sum(*world, *group);
}

TEST(DISABLED_Hangs, Rank1DiesInSetUp) {
  const WorldPtr world = make_world();
  if (world->rank() == 1) {
    kill(getpid(), SIGKILL);
  }
  expect_peer_error([&] { group_of_all(*world); });
}

TEST(DISABLED_Hangs, Rank0SavesAlone) {
  const WorldPtr world = make_world();
  take_steps(*world);
  if (world->rank() == 0) {
    const CallerScope caller("save_hugging_face");
    expect_peer_error([&] { world->group({0, 1, 2}, "files"); });
  }
}

/// Three processes that run a hanging test on one communication back end, and their output.
struct Job {
  std::string backend;
  testing::TemporaryFolder folder;
  std::vector<Ended> ranks;

  bool on_device() const { return backend == "nccl"; }
  /// The time-out is longer with NCCL, because CUDA starts slowly, and because a rank that ends
  /// waits for the other ranks.
  milliseconds timeout() const { return milliseconds(on_device() ? 5000 : 3200); }
  std::vector<std::string> explanation() const { return flight::explain_records(folder.path()); }
};

std::string fake_cuda() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() /
         "lib/fake_cuda/libcuda.so.1";
}

std::map<std::string, std::string> variables_of(const Job& job) {
  std::map<std::string, std::string> variables = {
      {"TESSERA_SHM", job.backend == "shm" ? "1" : "0"},
      {"TESSERA_WATCHDOG", "1"},
      {"TESSERA_TIMEOUT", job.on_device() ? "5" : "3.2"},
      {"TESSERA_RUN_DIR", job.folder.path()}};
  if (job.on_device()) {
    variables["HANGS_ON_NCCL"] = "1";
    variables["LD_PRELOAD"] = fake_cuda();
  }
  return variables;
}

/// Runs the test `body` in three processes for each back end, all at the same time, and then calls
/// `expect` for each Job.
template <class Expect>
void for_each_backend(const std::string& body, Expect&& expect) {
  std::list<Job> jobs;
  std::vector<std::thread> threads;
  for (const char* backend : {"shm", "gloo", "nccl"}) {
    if (backend == std::string("nccl") && !std::filesystem::exists(fake_cuda())) {
      continue;
    }
    Job& job = jobs.emplace_back();
    job.backend = backend;
    threads.emplace_back([&job, &body] {
      job.ranks = RunProcesses(3, "DISABLED_Hangs." + body,
                               {.environment = variables_of(job), .deadline = seconds(30)});
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Job& job : jobs) {
    SCOPED_TRACE(job.backend);
    expect(job);
  }
}

/// Parses a rank's output: how long the rank waited for its error, and the error's message.
std::pair<milliseconds, std::string> error_of(const Ended& ended) {
  std::smatch found;
  if (std::regex_search(ended.output, found, std::regex("error after (\\d+) ms: (.*)"))) {
    return {milliseconds(std::stoi(found[1])), found[2]};
  }
  std::smatch from;
  if (!std::regex_search(ended.output, from, std::regex("waits from (\\d+) ms")) ||
      !std::regex_search(ended.output, found, std::regex("(?:^|\n)error: (.*)"))) {
    ADD_FAILURE() << "no error in: " << ended.output;
    return {};
  }
  return {milliseconds(ended.at.time_since_epoch() / milliseconds(1) - std::stoll(from[1])),
          found[1]};
}

/// Returns the watchdog's report from a rank's output. Expects a report within 3 s.
std::string report_of(const Ended& ended) {
  std::smatch found;
  const std::regex line("tessera watchdog: .* did not (?:arrive|end) for ([0-9.]+) s.*");
  if (!std::regex_search(ended.output, found, line)) {
    ADD_FAILURE() << "no report in: " << ended.output;
    return {};
  }
  EXPECT_LT(std::stod(found[1]), 3.0);
  return found[0];
}

/// The watchdog must report within this time: its limit of 1 s plus 2 s for slow processes.
constexpr milliseconds kAfterTheLimit{3000};

/// The limit for errors that must come long before the time-out. Sanitizers slow processes.
#ifdef TESSERA_SANITIZED
constexpr milliseconds kSoon{2000};
#else
constexpr milliseconds kSoon{1000};
#endif

/// The time limit for an error that names a lost rank. NCCL's lost rank waits for the other ranks
/// before it ends, and the watchdog reports this wait.
milliseconds soon(const Job& job) {
  return job.on_device() ? job.timeout() : kSoon;
}

class HangsOfRank1 : public ::testing::TestWithParam<Fault> {};

TEST_P(HangsOfRank1, AreReportedWithTheRank) {
  const Fault& fault = GetParam();
  const testing::ScopedVariable variable("HANGS_FAULT", fault.name);
  for_each_backend("Rank1", [&](const Job& job) {
    const auto [after, error] = error_of(job.ranks[0]);
    const auto [after_2, error_2] = error_of(job.ranks[2]);
    const milliseconds at_once = job.on_device() ? kAfterTheLimit + job.timeout() : soon(job);
    EXPECT_LT(after, fault.when == Fault::kAtOnce ? at_once : job.timeout() + seconds(2));
    for (const char* word : fault.report) {
      EXPECT_CONTAINS(report_of(job.ranks[0]), word);
    }
    // Ranks 0 and 2 can fail at the same time. The error of only one of both must contain `word`.
    for (const char* word : fault.errors) {
      EXPECT_CONTAINS(error + error_2, word);
    }
    EXPECT_EQ(job.explanation().size(), 3U);
  });
}

INSTANTIATE_TEST_SUITE_P(Faults, HangsOfRank1, ::testing::ValuesIn(faults()),
                         [](const auto& info) { return info.param.name; });

TEST(Hangs, SlowRankIsReportedAndTheJobContinues) {
  for_each_backend("Rank1IsSlow", [](const Job& job) {
    EXPECT_CONTAINS(report_of(job.ranks[0]), "rank(s) 1 did not arrive for",
                    "rank 1 is outside of collectives");
    for (const Ended& ended : job.ranks) {
      EXPECT_EQ(ended.exit_code, 0) << ended.output;
    }
  });
}

TEST(Hangs, RankKilledDuringSetUpIsNamedImmediately) {
  for_each_backend("Rank1DiesInSetUp", [](const Job& job) {
    const auto [after, error] = error_of(job.ranks[2]);
    EXPECT_LT(after, kSoon);
    EXPECT_CONTAINS(error, "set-up in group 'all'",
                    "rank 1 died before its first collective; look for its error");
  });
}

TEST(Hangs, GroupCreatedByOnlyOneRankIsNamed) {
  for_each_backend("Rank0SavesAlone", [](const Job& job) {
    const auto [after, error] = error_of(job.ranks[0]);
    EXPECT_LT(after, soon(job));
    EXPECT_CONTAINS(error, "save_hugging_face is collective; rank ");
    EXPECT_CONTAINS(error, job.on_device() ? "" : " ended after ");
  });
}

// Ranks that are threads write no flight records to TESSERA_RUN_DIR: threads of equal rank in
// several processes of a job would write to the same files.
TEST(FlightRecords, AreNotWrittenToFilesByThreadWorlds) {
  const testing::TemporaryFolder folder;
  const testing::ScopedVariable variable("TESSERA_RUN_DIR", folder.path());
  const WorldPtr world = thread_worlds(1).front();
  sum(*world, *group_of_all(*world));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(FlightRecords, OfAnEarlierJobStayMappedAfterReplacement) {
  const testing::TemporaryFolder folder;
  const RecordPtr earlier = make_record({}, 1, folder.path());
  const RecordPtr later = make_record({}, 1, folder.path());
  earlier->step.store(3);
  EXPECT_EQ(later->step.load(), -1);
  EXPECT_EQ(flight::explain_records(folder.path()).size(), 1U);
}

}  // namespace
}  // namespace tessera::comm
