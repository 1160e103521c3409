#include "exit_status.h"

#include <string.h>
#include <sys/wait.h>

namespace tessera::run {

bool ExitStatus::by_signal() const {
  return WIFSIGNALED(status_);
}

int ExitStatus::code() const {
  return by_signal() ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
}

std::string ExitStatus::describe() const {
  if (!by_signal()) {
    return "exited with code " + std::to_string(code());
  }
  const int signal = WTERMSIG(status_);
  return "was killed by " + signal_name(signal) + " (" + strsignal(signal) + ")";
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

}  // namespace tessera::run
