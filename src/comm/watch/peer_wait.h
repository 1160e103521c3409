#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "group_info.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Throws PeerError for a transfer that failed with `reason`. First waits a moment to see whether
/// another rank has ended, and if so names it as the cause.
[[noreturn]] void fail_without_peers(const GroupInfo& group, const std::string& collective,
                                     const std::string& reason);

/// One wait of this rank for the other ranks of a group. The waiting code calls check() repeatedly,
/// which throws as soon as another rank has ended.
class PeerWait {
 public:
  /// Returns the world ranks that have not arrived yet.
  using Missing = std::function<std::vector<int>()>;

  /// `collective`: see describe().
  PeerWait(const GroupInfo& group, std::string collective);

  /// Throws PeerError if a missing rank has ended or given up, and at the time-out. The time-out
  /// counts from the last progress of missing ranks that read or write files (note_progress()).
  void check(const Missing& missing);

 private:
  using Clock = std::chrono::steady_clock;
  /// How many times progress with files is checked within a time-out. The latest progress is stored
  /// here, because a rank's record clears it when the rank arrives.
  static constexpr int kLooksAtWork = 32;

  /// The time (flight::now()) of the ranks' last progress with files; 0 if there was none.
  std::int64_t last_work(const std::vector<int>& ranks) const;
  [[noreturn]] void fail_because(const std::string& reason) const;
  [[noreturn]] void fail_late(const std::vector<int>& missing) const;

  const GroupInfo& group_;
  std::string collective_;
  std::string caller_;
  Clock::time_point begun_ = Clock::now();
  Clock::time_point next_look_at_work_ = begun_ + group_.timeout / kLooksAtWork;
  std::int64_t last_work_ = 0;  ///< the latest progress seen
};

}  // namespace tessera::comm
TESSERA_API_END
