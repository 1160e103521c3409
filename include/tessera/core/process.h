// The process of a program: its signals, its memory and how it ends.
#pragma once

#include <string>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that has stopped after a signal, has saved a checkpoint, and can be
/// restarted to continue: EX_TEMPFAIL of sysexits.h. tessera-run does not count it as a failure.
inline constexpr int kStoppedExitCode = 75;

/// While a StopSignals object exists, the signals SIGTERM and SIGUSR1 are recorded and do not end
/// the process. A batch system sends such a signal when the time of a job is over. A signal reaches
/// the ranks at different times, so that the ranks must agree before one rank stops. One object at
/// a time in a process. Thread safe.
class StopSignals : tessera::detail::NoCopy {
 public:
  StopSignals();
  /// Restores the previous signal handlers.
  ~StopSignals();

  /// Whether one of the signals was received.
  bool received() const;
};

/// Makes this process reuse the memory that it frees, up to 2 GiB at a time. For a training loop,
/// whose steps all allocate the same sizes: glibc otherwise returns large blocks to the system,
/// which must clear them again in the next step. Call keep_freed_memory() after the model is
/// loaded. Does nothing if glibc's variables for this are set (GLIBC_TUNABLES,
/// MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_), or with another C library.
void keep_freed_memory();

/// Ends this process with status 1 and one line on standard error, "`who`: `message`", without
/// libtorch's stack trace. Skips the normal shutdown, since other ranks may be waiting for this
/// rank.
[[noreturn]] void end_program(const std::string& who, std::string message);

}  // namespace tessera
TESSERA_API_END
