#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// How a process of a test has ended, and its output.
struct Ended {
  int exit_code = -1;  ///< -1 if a signal ended the process
  int signal = 0;
  std::chrono::milliseconds after{};  ///< time from the start of the first process to this end
  std::chrono::steady_clock::time_point at{};
  std::string output;
};

struct ProcessesOptions {
  std::map<std::string, std::string> environment;
  /// Time limit: after it, or if all running processes are stopped, signal 9 kills all processes.
  std::chrono::seconds deadline{60};
};

/// Runs the test `body` ("DISABLED_Suite.Name" of this program) in `size` processes with the
/// variables of world_from_environment(). For crashes and signals; for other tests, see RunRanks.
std::vector<Ended> RunProcesses(int size, const std::string& body,
                                const ProcessesOptions& options = {});

/// Returns a TCP port of 127.0.0.1 that is free at the time of the call.
int free_port();

/// Runs `work` in a process made by fork(). The exit code is the number that `work` returns.
/// Returns the status as waitpid() does.
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

/// Whether `work` returns normally in a separate process.
template <class Work>
bool survives(const Work& work) {
  const int status = status_of_process([&] {
    work();
    return 0;
  });
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace tessera::testing
