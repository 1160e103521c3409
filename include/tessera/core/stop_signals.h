#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that was asked to stop, has saved, and would continue if started
/// again: EX_TEMPFAIL of sysexits.h. tessera-run does not count it as a failure.
inline constexpr int kStoppedExitCode = 75;

/// While it exists, SIGTERM and SIGUSR1 are noted instead of ending the process: a batch system
/// sends them when the job's time is over. They reach the ranks at different moments, so the ranks
/// must agree before one of them stops. One at a time in a process. Thread safe.
class StopSignals {
 public:
  StopSignals();
  /// What the signals did before, they do again.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether one of them has come.
  bool received() const;
};

}  // namespace tessera
TESSERA_API_END
