// The process of a program: its signals, memory and end.
#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that stopped after a signal, has saved, and can be started again to
/// continue: EX_TEMPFAIL of sysexits.h. tessera-run does not count it as a failure.
inline constexpr int kStoppedExitCode = 75;

/// While it exists, SIGTERM and SIGUSR1 are noted instead of ending the process: a batch system
/// sends them when the job's time is over. They reach the ranks at different moments, so the ranks
/// must agree before one of them stops. One at a time in a process. Thread safe.
class StopSignals {
 public:
  StopSignals();
  /// Restores the old handlers.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether one of the signals was received.
  bool received() const;
};

/// Makes this process reuse the memory that it frees, up to 2 GiB at a time: for a training loop,
/// each step of which allocates the same. glibc otherwise returns large blocks to the system, which
/// must clear them again in the next step. Call it after the model is loaded.
/// It does nothing where glibc's variables for this are set (GLIBC_TUNABLES,
/// MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_), or with another C library.
void keep_freed_memory();

/// Ends this process with status 1 and one line on standard error, "`who`: `message`", without
/// libtorch's stack. At once, without the teardown of a healthy process, since peers may wait for
/// this rank.
[[noreturn]] void end_program(const std::string& who, std::string message);

}  // namespace tessera
TESSERA_API_END
