#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group_info.h"
#include "tessera/export.h"
#include "watch/world_watch.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Throws PeerError for a transfer that failed with `reason`. First waits a moment to see whether
/// another rank has ended; the message names that rank as the cause.
[[noreturn]] void fail_without_peers(const GroupInfo& group, const std::string& collective,
                                     const std::string& reason);

/// One wait of this rank for the other ranks of a group. The waiting code calls check() repeatedly,
/// which throws as soon as another rank has ended.
class PeerWait {
 public:
  /// Returns the world ranks that have not arrived yet, as far as known.
  using Missing = std::function<std::vector<int>()>;

  /// A wait in a call of the group. `collective`: see describe(). `number`: the call's number;
  /// nullopt for the group's last call.
  PeerWait(const GroupInfo& group, std::string collective,
           std::optional<std::uint64_t> number = std::nullopt);
  /// A wait in the call `number` of `group`. `call` returns the beginning of messages.
  PeerWait(WorldWatch& world, std::shared_ptr<const WatchedGroup> group, std::uint64_t number,
           std::chrono::milliseconds timeout, std::function<std::string()> call);

  /// Throws PeerError if a missing rank has ended or given up, and at the time-out. At the
  /// watchdog's limit, prints a line about the wait.
  void check(const Missing& missing);

  /// Why the call cannot complete: a missing rank has ended. "" if the call may still complete.
  std::string why_lost(const Missing& missing) const;
  /// After the time-out: which ranks did not arrive, and what these ranks do. Before the time-out:
  /// "". Prints a line at the watchdog's limit.
  std::string why_late(const Missing& missing);

 private:
  using Clock = std::chrono::steady_clock;

  std::string describe_missing(std::vector<int> missing, const std::string& time) const;

  WorldWatch& world_;
  std::shared_ptr<const WatchedGroup> group_;
  std::uint64_t number_;
  std::chrono::milliseconds timeout_;
  std::function<std::string()> call_;
  Clock::time_point begun_ = Clock::now();
  bool announced_ = false;  ///< whether this wait was announced to other hosts
  bool reported_ = false;
};

}  // namespace tessera::comm
TESSERA_API_END
