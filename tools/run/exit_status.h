#pragma once

#include <string>

namespace tessera::run {

/// How a process ended, from the status that waitpid() gives.
class ExitStatus {
 public:
  explicit ExitStatus(int wait_status) : status_(wait_status) {}

  bool ok() const { return status_ == 0; }
  bool by_signal() const;
  /// The exit code, or 128 + the signal's number.
  int code() const;
  /// "exited with code 3" or "was killed by SIGKILL (Killed)".
  std::string describe() const;

 private:
  int status_;
};

/// "SIGTERM" for 15.
std::string signal_name(int signal);

}  // namespace tessera::run
