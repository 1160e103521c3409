#include "leftovers.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace tessera::run {

std::set<pid_t> children_of_this_process() {
  std::ifstream file("/proc/self/task/" + std::to_string(getpid()) + "/children");
  std::set<pid_t> children;
  for (pid_t pid = 0; file >> pid;) {
    children.insert(pid);
  }
  return children;
}

void end_children_but(const std::set<pid_t>& spared) {
  // In rounds, because the children of a killed process become ours.
  for (int round = 0; round < 100; ++round) {
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    bool any = false;
    for (const pid_t pid : children_of_this_process()) {
      if (!spared.contains(pid)) {
        any = true;
        kill(pid, SIGKILL);
      }
    }
    if (!any) {
      return;
    }
    // Time for the kernel to end them. Together the rounds take about a second at most.
    usleep(10'000);
  }
}

}  // namespace tessera::run
