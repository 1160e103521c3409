// The process of a program: its signals, its memory and how it ends.
#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that has stopped after a signal, has saved a checkpoint, and can be
/// restarted to continue: EX_TEMPFAIL of sysexits.h. tessera-run does not count it as a failure.
inline constexpr int kStoppedExitCode = 75;

/// While it exists, SIGTERM and SIGUSR1 are recorded instead of ending the process. A batch system
/// sends them when the job's time is over. They reach the ranks at different times, so the ranks
/// must agree before one of them stops. One object at a time in a process. Thread safe.
class StopSignals {
 public:
  StopSignals();
  /// Restores the previous signal handlers.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether one of the signals was received.
  bool received() const;
};

/// Makes this process reuse the memory that it frees, up to 2 GiB at a time. For a training loop,
/// whose steps all allocate the same sizes: glibc otherwise returns large blocks to the system,
/// which must clear them again in the next step. Call it after the model is loaded. Does nothing if
/// glibc's variables for this are set (GLIBC_TUNABLES, MALLOC_TRIM_THRESHOLD_,
/// MALLOC_MMAP_THRESHOLD_), or with another C library.
void keep_freed_memory();

/// Ends this process with status 1 and one line on standard error, "`who`: `message`", without
/// libtorch's stack trace. Skips the normal shutdown, since other ranks may be waiting for this
/// rank.
[[noreturn]] void end_program(const std::string& who, std::string message);

}  // namespace tessera
TESSERA_API_END
