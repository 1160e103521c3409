// Functions for a program's process: signals, memory and exit.
#pragma once

#include <string>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that saved a checkpoint after a signal and can be restarted
/// (EX_TEMPFAIL). tessera-run does not count this exit as a failure.
inline constexpr int kStoppedExitCode = 75;

/// While a StopSignals object exists, SIGTERM and SIGUSR1 are recorded and do not end the process.
/// Slurm, for example, can send such a signal at the end of a job. Ranks receive a signal at
/// different times, so the ranks must agree on the last step. Only one StopSignals object may
/// exist. Thread safe.
class StopSignals : tessera::detail::NoCopy {
 public:
  StopSignals();
  /// Restores the previous signal handlers.
  ~StopSignals();

  /// Whether SIGTERM or SIGUSR1 was received.
  bool received() const;
};

/// Makes malloc reuse freed memory, up to 2 GiB, instead of returning the memory to the kernel.
/// Saves time in training loops. Call after the model is loaded. Does nothing without glibc, or if
/// environment variables set malloc's limits.
void keep_freed_memory();

/// Ends the process with status 1, and prints "`who`: `message`" on standard error. Skips the
/// normal shutdown, because other ranks can be waiting for this rank.
[[noreturn]] void end_program(const std::string& who, std::string message);

}  // namespace tessera
TESSERA_API_END
