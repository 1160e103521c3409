#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "group_info.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/world_watch.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Throws PeerError for a transfer that failed with `reason`. First waits a moment for news that
/// another rank has ended; the message then names that rank as the cause.
[[noreturn]] void fail_without_peers(const GroupInfo& group, const std::string& collective,
                                     const std::string& reason);

/// A wait for the other ranks of a process group. The waiting code calls check() repeatedly, which
/// throws as soon as another rank has ended.
class PeerWait {
 public:
  /// A function that returns the world ranks that are known not to have arrived yet.
  using Missing = std::function<std::vector<int>()>;

  /// Begins a wait in a call of `group`. `collective`: the call's name in messages. `number`: the
  /// call's number; nullopt for the group's last call.
  PeerWait(const GroupInfo& group, std::string collective,
           std::optional<std::uint64_t> number = std::nullopt);
  /// Begins a wait in the call `number` of `group`. `call` returns the beginning of messages.
  PeerWait(WorldWatch& world, std::shared_ptr<const WatchedGroup> group, std::uint64_t number,
           std::chrono::milliseconds timeout, std::function<std::string()> call);

  /// Throws PeerError if a missing rank has ended or aborted, and at the time-out. At the
  /// watchdog's limit, prints a line about the wait.
  void check(const Missing& missing);

  /// A text with the missing rank that has ended, so that the call cannot complete; "" if none has.
  std::string why_lost(const Missing& missing) const;
  /// After the time-out, a text with the ranks that did not arrive and what they do; before the
  /// time-out, "". Prints a line at the watchdog's limit.
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
  bool announced_ = false;  ///< whether this wait was announced to other machines
  bool reported_ = false;
};

/// A thread that waits for collectives on the GPU. The program does not wait for these collectives,
/// so no function of the program can throw. If a collective cannot complete, the watchdog prints
/// one line and ends the process.
class Watchdog : tessera::detail::NoCopy {
 public:
  explicit Watchdog(WorldWatch& world) : world_(world) {}
  ~Watchdog() { stop(); }

  /// Ends the thread permanently.
  void stop();
  /// Watches a collective until `is_done` returns true. Ends the process if `is_done` throws, if
  /// another rank will not take part, and at the time-out. `is_done` must not own the World or its
  /// groups, so that the thread never destroys them. Starts the thread. Does nothing after stop().
  /// Thread safe.
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
  std::vector<DeviceCall> added_;  ///< new collectives, not yet moved to calls_ by the thread
  std::thread thread_;
  // Only the watchdog's thread uses the following members.
  std::vector<DeviceCall> calls_;  ///< collectives on the GPU that have not ended, in order
  /// The wait for the first of calls_; it begins when the previous collective has completed.
  std::optional<PeerWait> wait_;
  /// The time at which the watchdog saw that a rank has ended that the first of calls_ needs.
  std::optional<std::chrono::steady_clock::time_point> lost_since_;
};

/// While this object exists, the watchdog watches a call of this thread that may block forever in
/// NCCL.
class BlockingScope : tessera::detail::NoCopy {
 public:
  BlockingScope(GroupWatch& watch, const BegunCall& call) {
    // `call` is watched until the destructor has run. The caller records the end of the call.
    watch.world().watchdog().await([returned = returned_] { return returned->load(); }, call,
                                   watch.group());
  }
  ~BlockingScope() { *returned_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> returned_ = std::make_shared<std::atomic<bool>>(false);
};

/// Starts `question`, a function of the store, and returns its future result. The process that
/// serves the store may be stopped, and most calls of a store have no time-out. So a detached
/// thread calls a store of another process. The thread may outlive the caller, so `question` must
/// own everything that it uses.
template <class Question>
auto ask(detail::StorePtr store, Question question) {
  const bool in_memory = detail::is_in_memory(store);
  std::packaged_task<std::invoke_result_t<Question, detail::Store&>()> task(
      [store = std::move(store), question = std::move(question)]() mutable {
        return question(*store);
      });
  auto answer = task.get_future();
  if (in_memory) {
    task();
  } else {
    // The future is ready only after the thread's task, with all that it owns, is destroyed.
    std::thread([task = std::move(task)]() mutable { task.make_ready_at_thread_exit(); }).detach();
  }
  return answer;
}

/// Whether `answer`, a result of ask(), is ready within `time`.
template <class Answer>
bool arrives(const std::future<Answer>& answer, std::chrono::microseconds time) {
  return answer.wait_for(time) == std::future_status::ready;
}

/// Returns when all ranks of a group have called meet(). Only this call may use `store`. Called
/// before a back end is made, because its creation would wait for a dead rank until the time-out.
/// Throws PeerError as PeerWait does.
void meet(const detail::StorePtr& store, const GroupInfo& group);

/// Whether every rank of the World calls this function within 2 s, each rank for one group. All
/// ranks get the same answer. `world`: the store of all ranks. `own`: a store that only this group
/// uses, and only for this call. `meeting`: the prefix of the keys in `world`; only the prefix of a
/// group's first rank is used. Throws PeerError as PeerWait does.
bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting);

/// Sets a key of a c10d store. Throws PeerError as PeerWait does.
void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value);

/// Waits until rank `from` of the group sets `key`, and returns the value of the key. Throws
/// PeerError as PeerWait does.
std::string value_from(const detail::StorePtr& store, const GroupInfo& group, int from,
                       const std::string& key);

}  // namespace tessera::comm
TESSERA_API_END
