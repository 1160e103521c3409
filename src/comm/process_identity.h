#pragma once

#include <cstdint>

namespace tessera::comm {

/// A process of this host, told apart from a later one with the same pid.
struct ProcessIdentity {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< in clock ticks since boot
};

ProcessIdentity this_process();
/// False once the process has ended, also while it waits to be reaped.
bool is_alive(const ProcessIdentity& process);

}  // namespace tessera::comm
