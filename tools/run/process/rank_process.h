// One rank as a process: how it is started, and what its end says.

#pragma once

#include <sys/types.h>

#include <exception>
#include <string>
#include <vector>

#include "file_descriptor.h"
#include "guardian.h"

namespace tessera::run {

/// How a process ended, from the status that waitpid() gives.
class ExitStatus {
 public:
  explicit ExitStatus(int wait_status) : status_(wait_status) {}

  bool ok() const { return status_ == 0; }
  /// It was asked to stop and has saved what it needs to continue (kStoppedExitCode).
  bool stopped() const;
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

/// How a rank is started.
struct RankCommand {
  std::vector<std::string> program;      ///< looked up in PATH where it holds no slash
  std::vector<std::string> environment;  ///< "NAME=value"
  int inherited = -1;                    ///< a descriptor to hand on, or -1
  bool own_stdin = false;                ///< has the launcher's standard input, but for a terminal
  bool own_stdout = false;               ///< has the launcher's standard output
};

/// A started rank: a direct child, leader of its own process group, killed by the kernel when the
/// launcher ends in any way.
struct RankProcess {
  pid_t pid = -1;
  FileDescriptor out;  ///< to read; none where the rank has the launcher's standard output
  FileDescriptor err;  ///< to read
};

/// The program cannot be run; `exit_code()` is what a shell would give, 127 or 126.
class CannotExecute : public std::exception {
 public:
  CannotExecute(const std::string& program, int error);
  const char* what() const noexcept override { return message_.c_str(); }
  int exit_code() const { return exit_code_; }

 private:
  std::string message_;
  int exit_code_;
};

/// Returns once the program runs, in a process group that `guardian` watches. Throws CannotExecute,
/// or Error where no process can be had.
RankProcess start_rank(const RankCommand& command, Guardian& guardian);

}  // namespace tessera::run
