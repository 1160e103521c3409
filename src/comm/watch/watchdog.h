#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/export.h"
#include "watch/group_watch.h"
#include "watch/world_watch.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// A thread that reports on stderr if this rank waits longer than the limit: its collective, the
/// missing ranks, and the activity of all ranks.
class Watchdog {
 public:
  explicit Watchdog(WorldWatch& watch) : watch_(watch) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog();

  /// Starts the thread if there is a limit. Thread safe.
  void start();
  /// Ends the thread permanently.
  void stop();
  /// Watches a call whose wait() has returned before the device has finished it. `progress` returns
  /// whether the device has finished; it throws if the device never will. The host cannot throw at
  /// that point, so the watchdog's thread ends the process in that case, if another rank will not
  /// take part, or at the time-out. `progress` must own neither the world nor its groups, because
  /// otherwise the thread could be the one that destroys them. Does nothing after stop(). Thread
  /// safe.
  void await_device(std::function<bool()> progress, const BegunCall& call);
  /// Like await_device(), for a call that may block its thread forever in a device's library, until
  /// `returned` is true. The caller records the call's end.
  void await_thread(std::shared_ptr<const std::atomic<bool>> returned, const BegunCall& call);

 private:
  struct DeviceWork {
    std::function<bool()> is_done;
    BegunCall call;
    bool ends_call;  ///< whether the call ends with this device work
  };
  /// A wait that was reported, so that its end can be reported as well.
  struct Reported {
    std::int64_t since = 0;  ///< 0 if another rank reported it
    std::vector<int> missing;
  };

  using Reports = std::vector<flight::RankReport>;

  void add(DeviceWork work);
  void start_thread();
  void run();
  void tick();
  void answer_questions();
  void tell_of_work();
  void look_at_devices();
  void look_at_peers();
  void look_at_waits();
  std::string why_stuck(const flight::Call& call, const Reports& reports);
  std::int64_t last_work_for(const flight::Call& call) const;
  bool reports_for_others(const flight::Call& call,
                          const std::vector<flight::RankReport>& reports) const;
  void report(const flight::Call& call);
  void say_that_it_ended(const flight::Call& call, const Reported& reported) const;
  bool is_on_device(const flight::Call& call);
  void end_if_late(const flight::Call& call);
  [[noreturn]] void end_process(const flight::Call& call, const std::string& why) const;

  WorldWatch& watch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stops_ = false;
  std::vector<DeviceWork> devices_;
  std::map<std::uint64_t, Reported> reported_;  ///< by order; used only by the thread
  std::int64_t answered_ = 0;                   ///< last answered question of other hosts
  std::int64_t told_of_work_ = 0;               ///< when progress was last reported to other hosts
  /// since when a rank that has begun the call is gone; 0 if none is
  std::int64_t stuck_since_ = 0;
  std::thread thread_;
};

/// While it exists, the watchdog watches this thread's call as await_thread() says.
class BlockingScope {
 public:
  BlockingScope(GroupWatch& watch, const BegunCall& call) {
    watch.waits(call);  // starts now, because earlier steps have separate time-outs
    watch.world().watchdog().await_thread(returned_, call);
  }
  BlockingScope(const BlockingScope&) = delete;
  BlockingScope& operator=(const BlockingScope&) = delete;
  ~BlockingScope() { *returned_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> returned_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
