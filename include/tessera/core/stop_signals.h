#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The exit code of a program that was told to stop, has saved, and would go on if it were started
/// again: EX_TEMPFAIL of sysexits.h. tessera-run takes it for no failure.
inline constexpr int kStoppedExitCode = 75;

/// While it exists, SIGTERM and SIGUSR1 are noted instead of ending the process: a batch system's
/// word that its time is over. Ranks are told at different moments, so they must agree before one
/// of them stops. One at a time in a process. Thread safe.
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
