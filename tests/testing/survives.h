#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::testing {

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
