// Each rank of a job records its collectives in a flight record. A rank that waits for other ranks
// throws an error if one of these ranks has ended.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "group_info.h"
#include "tessera/core/detail/flight_record.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// The flight record (log of collectives) of a rank, in memory that is shared with other processes.
using RecordPtr = std::shared_ptr<flight::Record>;

struct WatchSettings {
  int rank = 0;
  int world = 0;                      ///< the World's number among the Worlds of its process
  std::chrono::milliseconds limit{};  ///< time after which a waiting rank prints a line; 0: never
  std::chrono::milliseconds timeout{};
};

/// Makes an empty flight record for this rank of a world of `size` ranks: a file in `folder`, or
/// anonymous memory if `folder` is "". Throws Error if the file cannot be made.
RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder);
/// Maps another rank's flight record; nullptr on failure. `handle`: see handle_of_file().
RecordPtr open_record(const std::string& handle);

struct BegunCall {
  std::uint64_t group = 0;   ///< flight::GroupSlot::id of the collective's process group
  std::uint64_t number = 0;  ///< number of the collective in its group, from 1; 0: group set-up
  std::string text = {};     ///< "all_reduce for unit 'a' (call 7 of group 'dp'), called by step"
};

class WorldWatch;

/// A wait for the other ranks of a process group.
class PeerWait {
 public:
  /// `collective`: the collective's name, for messages. `number`: the number of the call in the
  /// process group; nullopt means the group's last call.
  PeerWait(const GroupInfo& group, const std::string& collective,
           std::optional<std::uint64_t> number = std::nullopt);
  PeerWait(WorldWatch& world, BegunCall call, std::chrono::milliseconds timeout,
           std::string beginning);

  /// Must be called repeatedly during the wait. Throws PeerError at the time-out, or if a missing
  /// rank has ended. `missing`: the ranks that have not arrived; by default WorldWatch::not_in().
  void check(std::optional<std::vector<int>> missing = std::nullopt);

 private:
  using Clock = std::chrono::steady_clock;

  std::string lateness(const std::vector<int>& missing) const;

  WorldWatch& world_;
  BegunCall call_;
  std::chrono::milliseconds timeout_;
  std::string beginning_;
  Clock::time_point begun_ = Clock::now();
  /// When check() first found that a missing rank has ended.
  std::optional<Clock::time_point> lost_since_;
  bool announced_ = false;  ///< whether this rank has announced the wait to other machines
  bool reported_ = false;
};

/// Writes this rank's flight record. Reads the states of the other ranks: on this machine from
/// their flight records, on other machines from the job's store. Thread safe.
class WorldWatch : tessera::detail::NoCopy {
 public:
  /// `records`: the flight record of each rank; nullptr for ranks on other machines. `store`: a
  /// separate connection to the job's store; nullptr if all ranks are on this machine.
  WorldWatch(const WatchSettings& settings, std::vector<RecordPtr> records, detail::StorePtr store)
      : settings_(settings), records_(std::move(records)), store_(std::move(store)) {}
  ~WorldWatch() { end(); }

  const WatchSettings& settings() const { return settings_; }
  flight::Record& own() const { return *record_of(settings_.rank); }
  void set_step(std::int64_t step) { own().step.store(step, std::memory_order_relaxed); }
  /// Records that this rank has aborted, so that ranks that wait for this rank fail.
  void give_up() { note_end(flight::RankState::kGaveUp); }
  /// Records that this rank will call no more collectives, and ends the thread of await_device().
  void end();
  /// Waits until all ranks have ended, at most for the time-out. Prints a line for a long wait.
  void await_ends();

  /// Adds a process group to the flight record and returns an id for the process group.
  std::uint64_t add_group(const std::string& name, const std::vector<int>& ranks);
  /// Records whether this rank waits for the end of `call` (`waits`).
  void note(const BegunCall& call, bool waits);

  std::vector<int> away(std::vector<int> ranks) const;
  /// Returns the ranks of the process group that cannot complete `call`. On this machine: ranks
  /// that have failed or not begun the call. On other machines: ranks that have ended.
  std::vector<int> not_in(const BegunCall& call);
  /// Returns the rank in `ranks` that ended first; nullopt if none has ended.
  std::optional<int> first_to_end(std::vector<int> ranks);
  /// Returns what a rank is doing, as text: "rank 1 waits in ...". For a rank that has ended, the
  /// text also contains advice for the user.
  std::string what_it_does(int rank);

  /// Announces to other machines what `rank`, a rank on this machine, is doing. `topic`: a word. A
  /// later announcement with the same rank and topic replaces the earlier one.
  void announce(int rank, const std::string& topic, const std::string& text);
  /// Returns the ranks on other machines that may be late for `call`. Such ranks have neither ended
  /// nor announced a wait in `call` or in a later call.
  std::vector<int> not_waiting(const BegunCall& call);

  /// Watches a collective on the GPU on a thread, until `is_done` returns true. On an error, when a
  /// rank has ended, or at the time-out, prints one line and ends the process. `is_done` must not
  /// own the World or its groups.
  void await_device(std::function<bool()> is_done, const BegunCall& call);

 private:
  struct DeviceCall {
    std::function<bool()> is_done;
    BegunCall call;
  };

  /// The flight record of a rank; nullptr if the rank is on another machine.
  const RecordPtr& record_of(int rank) const { return records_[static_cast<std::size_t>(rank)]; }
  bool has_ended(int rank);
  void note_end(flight::RankState state);
  void read_announcements();
  void watch_device();
  void look_at_device();

  WatchSettings settings_;
  std::vector<RecordPtr> records_;
  std::mutex writes_;  ///< locked while the flight record is written

  detail::StorePtr store_;
  std::mutex mutex_;                ///< protects the members from here to `announced_`
  std::future<std::string> asked_;  ///< a request to the store for all announcements
  std::chrono::steady_clock::time_point next_question_;
  std::map<std::pair<int, std::string>, std::string> announced_;

  std::mutex device_mutex_;  ///< protects the members from here to `device_thread_`
  std::condition_variable ends_thread_;
  bool ended_ = false;
  std::list<DeviceCall> added_;
  std::thread device_thread_;
  // Only the thread `device_thread_` uses the members `calls_` and `wait_`.
  std::list<DeviceCall> calls_;  ///< collectives on the GPU that have not ended, in order
  /// The wait for the first of calls_, which begins when the previous collective has completed.
  std::optional<PeerWait> wait_;
};
using WorldWatchPtr = std::shared_ptr<WorldWatch>;

/// Records the collectives of a process group in this rank's flight record. Not thread safe.
class GroupWatch {
 public:
  GroupWatch(WorldWatchPtr world, std::string name, const std::vector<int>& ranks)
      : world_(std::move(world)), name_(std::move(name)), id_(world_->add_group(name_, ranks)) {}

  /// Records that this thread has begun the group's next collective and waits in the collective.
  BegunCall begin(std::string collective, std::string_view purpose = {});
  void waits(const BegunCall& call) { world_->note(call, true); }
  void leaves(const BegunCall& call) { world_->note(call, false); }

  std::uint64_t id() const { return id_; }
  std::uint64_t number() const { return begun_ - 1; }
  WorldWatch& world() const { return *world_; }

 private:
  WorldWatchPtr world_;
  std::string name_;
  std::uint64_t id_;
  /// How many calls have begun. Atomic, because threads that wait for calls read the number.
  std::atomic<std::uint64_t> begun_ = 0;
};

/// Throws PeerError because a transfer has failed with `reason`. First waits up to a few seconds
/// for the end of a rank, to name that rank as the cause.
[[noreturn]] void fail_without_peers(const GroupInfo& group, const std::string& collective,
                                     const std::string& reason);

/// Returns the future result of `question(store)`. A store that is not in memory can block, so
/// `question` runs on a detached thread. `question` must own everything that it uses.
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
    // The future is ready only when the thread has destroyed everything that the task owns.
    std::thread([task = std::move(task)]() mutable { task.make_ready_at_thread_exit(); }).detach();
  }
  return answer;
}

// The ranks of a group call the following functions to communicate through the job's store. The
// functions throw PeerError as PeerWait::check() does.

/// Waits until all ranks of a group have called meet(). `store`: a store for this call only. Must
/// precede the making of a back end, because a back end would wait for a dead rank.
void meet(const detail::StorePtr& store, const GroupInfo& group);

/// Whether all ranks of the World call this function within 2 s, each rank with one group. The
/// result is equal on all ranks. `world`: a store of all ranks. `own`: a store for this group and
/// call. `meeting`: a prefix for keys in `world`.
bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting);

void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value);

/// Waits until a rank of the group sets `key`, and returns the value of the key.
std::string value_of(const detail::StorePtr& store, const GroupInfo& group, const std::string& key);

}  // namespace tessera::comm
TESSERA_API_END
