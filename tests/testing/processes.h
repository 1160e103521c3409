#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// How a process of a test ended.
struct Ended {
  int exit_code = -1;  ///< -1: by a signal
  int signal = 0;
  std::chrono::milliseconds after{};  ///< time since the first process was started
  std::chrono::steady_clock::time_point at{};
  std::string output;  ///< stdout and stderr
};

struct ProcessesOptions {
  std::map<std::string, std::string> environment;
  /// After this time all processes are killed (signal 9); sooner if all that are left are stopped.
  std::chrono::seconds deadline{60};
};

/// Runs the test `body` ("DISABLED_Suite.Name" of this same program) in `size` processes, with the
/// variables that world_from_environment() reads. For crashes and signals; else use RunRanks.
std::vector<Ended> RunProcesses(int size, const std::string& body,
                                const ProcessesOptions& options = {});

/// A TCP port of 127.0.0.1 that was free a moment ago.
int free_port();

/// Runs `work` in a separate process, made by fork(), which exits with the number that it
/// returns. The process's status, as waitpid() has it.
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

/// Whether `work` ends normally in a separate process.
template <class Work>
bool survives(const Work& work) {
  const int status = status_of_process([&] {
    work();
    return 0;
  });
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace tessera::testing
