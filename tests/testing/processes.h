#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// How a process ended, and what it printed.
struct Ended {
  int exit_code = -1;  ///< -1 if a signal ended the process
  int signal = 0;
  std::chrono::milliseconds after{};  ///< time since the first process was started
  std::chrono::steady_clock::time_point at{};
  std::string output;
};

struct ProcessesOptions {
  std::map<std::string, std::string> environment;
  /// SIGKILL ends all processes after this time, or once only stopped processes remain.
  std::chrono::seconds deadline{60};
};

/// Runs the test `body` ("DISABLED_Suite.Name") in `size` processes, which call
/// world_from_environment(). For tests of crashes and signals; other tests use RunRanks().
std::vector<Ended> RunProcesses(int size, const std::string& body,
                                const ProcessesOptions& options = {});

int free_port();

/// Runs `work` in a forked process. The exit code is the result of `work`. Returns the status from
/// waitpid().
template <class Work>
int status_of_process(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(work());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

/// Runs `work` in a forked process. Returns false if a signal ends the process.
template <class Work>
bool survives(const Work& work) {
  const int status = status_of_process([&] {
    work();
    return 0;
  });
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace tessera::testing
