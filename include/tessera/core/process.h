// Functions for a program's process: signals, memory and exit.
#pragma once

#include <string>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that a signal has stopped, that has saved a checkpoint, and that can
/// be restarted: EX_TEMPFAIL of sysexits.h. tessera-run does not count this exit as a failure.
inline constexpr int kStoppedExitCode = 75;

/// While a StopSignals object exists, the signals SIGTERM and SIGUSR1 are recorded and do not end
/// the process. A batch system such as Slurm sends such a signal when the time of a job is over.
/// Ranks receive the signal at different times, so the ranks must agree on the step at which all
/// stop. Only one StopSignals object may exist at a time. Thread safe.
class StopSignals : tessera::detail::NoCopy {
 public:
  StopSignals();
  /// Restores the previous signal handlers.
  ~StopSignals();

  /// Whether SIGTERM or SIGUSR1 was received.
  bool received() const;
};

/// Makes malloc reuse freed memory, up to 2 GiB, instead of returning the memory to the kernel.
/// Useful for training loops, in which all steps allocate the same sizes: otherwise the kernel
/// clears the pages of large blocks in each step. Call keep_freed_memory() after the model is
/// loaded. Does nothing if environment variables set malloc's limits (GLIBC_TUNABLES,
/// MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_), or if the C library is not glibc.
void keep_freed_memory();

/// Ends this process with status 1 and one line on standard error, "`who`: `message`", without
/// libtorch's stack trace. Skips the normal shutdown, since other ranks can be waiting for this
/// rank.
[[noreturn]] void end_program(const std::string& who, std::string message);

}  // namespace tessera
TESSERA_API_END
