#pragma once

// Jobs of three processes that hang, and their output.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <list>
#include <map>
#include <regex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "testing/files.h"
#include "testing/processes.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Ended;
using testing::RunProcesses;

/// A job of three ranks that hangs, on one of the back ends.
struct Job {
  std::string backend;
  testing::TemporaryFolder folder;
  std::vector<Ended> ranks;

  bool on_device() const { return backend == "nccl"; }
  /// On NCCL the time-out must be longer than CUDA's start, and than a rank's wait for peers at its
  /// own end.
  milliseconds timeout() const { return milliseconds(on_device() ? 5000 : 3200); }
  std::vector<std::string> explanation() const { return flight::explain_records(folder.path()); }
};

inline std::string fake_cuda() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() /
         "lib/fake_cuda/libcuda.so.1";
}

inline std::map<std::string, std::string> variables_of(const Job& job) {
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

inline constexpr std::array<const char*, 3> kBackends = {"shm", "gloo", "nccl"};
inline const std::span kOnHosts = std::span(kBackends).first(2);

/// Runs the body on each back end and calls `expect` for each job. Jobs run at the same time, since
/// they mostly wait. The watchdog's limit is 1 s.
template <class Expect>
void for_each_backend(const std::string& body, Expect&& expect,
                      std::span<const char* const> backends = kBackends) {
  std::list<Job> jobs;
  std::vector<std::thread> threads;
  for (const char* backend : backends) {
    if (backend == std::string("nccl") && !std::filesystem::exists(fake_cuda())) {
      continue;  // built without CUDA's headers
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

/// How long the rank waited until its error, and the error's text.
inline std::pair<milliseconds, std::string> error_of(const Ended& ended) {
  std::smatch found;
  if (std::regex_search(ended.output, found, std::regex("error after (\\d+) ms: (.*)"))) {
    return {milliseconds(std::stoi(found[1])), found[2]};
  }
  std::smatch from;
  if (!std::regex_search(ended.output, from, std::regex("waits from (\\d+) ms")) ||
      !std::regex_search(ended.output, found, std::regex("error: (.*)"))) {
    ADD_FAILURE() << "no error in: " << ended.output;
    return {};
  }
  return {milliseconds(ended.at.time_since_epoch() / milliseconds(1) - std::stoll(from[1])),
          found[1]};
}

/// The watchdog's report, which must come within its limit and two seconds.
inline std::string report_of(const Ended& ended) {
  std::smatch found;
  const std::regex line("tessera watchdog: .* did not (?:arrive|end) for ([0-9.]+) s.*");
  if (!std::regex_search(ended.output, found, line)) {
    ADD_FAILURE() << "no report in: " << ended.output;
    return {};
  }
  EXPECT_LT(std::stod(found[1]), 3.0);
  return found[0];
}

}  // namespace tessera::comm
