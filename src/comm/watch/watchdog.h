#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/export.h"
#include "watch/group_watch.h"
#include "watch/peer_wait.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// A thread that waits for collectives that the device runs. The host does not wait for these
/// collectives, so no function of the program can throw. If a collective cannot complete, the
/// watchdog ends the process with one line.
class Watchdog {
 public:
  explicit Watchdog(WorldWatch& world) : world_(world) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog();

  /// Ends the thread permanently.
  void stop();
  /// Watches a call until `is_done` returns true. Ends the process if `is_done` throws, if another
  /// rank will not take part, and at the time-out. `is_done` must own neither the world nor its
  /// groups, because otherwise the thread could be the one that destroys them. Starts the thread.
  /// Does nothing after stop(). Thread safe.
  void await(std::function<bool()> is_done, const BegunCall& call,
             std::shared_ptr<const WatchedGroup> group);

 private:
  struct DeviceCall {
    std::function<bool()> is_done;
    BegunCall call;
    std::shared_ptr<const WatchedGroup> group;
  };

  void run();
  void tick();
  void look_at(const DeviceCall& device);
  [[noreturn]] void end_process(const BegunCall& call, const std::string& why) const;

  WorldWatch& world_;
  std::mutex mutex_;  ///< protects the members from here to `thread_`
  std::condition_variable changed_;
  bool stops_ = false;
  std::vector<DeviceCall> added_;  ///< new calls, not yet moved to calls_ by the thread
  std::thread thread_;
  // Only the watchdog's thread uses the following members.
  std::vector<DeviceCall> calls_;  ///< calls of the device that have not ended, in order
  /// The wait for the first call, since the last progress of the device.
  std::optional<PeerWait> wait_;
  /// The time at which the watchdog saw that a rank for which the first call waits has ended.
  std::optional<std::chrono::steady_clock::time_point> lost_since_;
};

/// While this object exists, the watchdog watches a call of this thread, which may block forever in
/// a library of the device.
class BlockingScope {
 public:
  BlockingScope(GroupWatch& watch, const BegunCall& call) {
    // The watchdog does not record the end of the call, because the caller does.
    watch.world().watchdog().await([returned = returned_] { return returned->load(); }, call,
                                   watch.group());
  }
  BlockingScope(const BlockingScope&) = delete;
  BlockingScope& operator=(const BlockingScope&) = delete;
  ~BlockingScope() { *returned_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> returned_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
