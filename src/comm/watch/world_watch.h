#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_BEGIN
namespace tessera::comm {

class Watchdog;

/// The memory of a rank's flight record (log of its collectives). Only that rank writes the memory;
/// other ranks on the machine map the memory.
class RecordMemory : tessera::detail::NoCopy {
 public:
  /// Takes ownership of the file and of its mapping.
  RecordMemory(int fd, flight::Record* record, std::string handle)
      : fd_(fd), record_(record), handle_(std::move(handle)) {}
  ~RecordMemory();

  flight::Record& record() const { return *record_; }
  /// The handle that other processes pass to open_record(); valid while this object exists.
  const std::string& handle() const { return handle_; }

 private:
  int fd_;
  flight::Record* record_;
  std::string handle_;
};
using RecordPtr = std::shared_ptr<RecordMemory>;

struct WatchSettings {
  int rank = 0;
  /// The number of the World in its process, in order of creation.
  int world = 0;
  std::chrono::milliseconds limit{};  ///< a line is printed about a longer wait; 0: never
  std::chrono::milliseconds timeout{};
};

/// The folder TESSERA_RUN_DIR, in which the flight records of a job's ranks are files; "" if the
/// variable is not set.
std::string run_folder();
/// Makes a record without calls for this rank of a world of `size` ranks: a file in `folder`, which
/// is not deleted later, or, if `folder` is "", anonymous memory (memfd), which is freed when the
/// last process that maps it ends. Throws Error if the file cannot be made.
RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder);
/// Maps another rank's flight record by its handle(); nullptr on failure.
RecordPtr open_record(const std::string& handle);

/// A process group whose calls are recorded.
struct WatchedGroup {
  std::uint64_t id = 0;  ///< the group's id, as in GroupSlot::id
  std::vector<int> ranks;
};

/// WorldWatch writes this rank's flight record and reads the state of the other ranks: from their
/// flight records on the same machine, through the job's store on other machines. Thread safe.
class WorldWatch : tessera::detail::NoCopy {
 public:
  /// Starts no thread. `records`: the flight record of each rank, nullptr for ranks on other
  /// machines. `store`: the job's store; nullptr if all ranks are on this machine.
  WorldWatch(const WatchSettings& settings, std::vector<RecordPtr> records, detail::StorePtr store);
  /// Records that this rank begins no more collectives.
  ~WorldWatch();

  const WatchSettings& settings() const { return settings_; }
  flight::Record& own() const { return memory(settings_.rank)->record(); }
  Watchdog& watchdog() const { return *watchdog_; }
  void set_step(std::int64_t step) { own().step.store(step, std::memory_order_relaxed); }
  /// Records that this rank has aborted, so that ranks that wait for this rank fail.
  void give_up() { note_end(flight::RankState::kGaveUp); }
  /// Records that this rank begins no more collectives, and stops the watchdog.
  void end();

  /// Whether `rank` may begin more collectives; false once the rank has ended or aborted. Cheap.
  bool may_come(int rank) const;
  /// Returns which of `ranks` ended first; nullopt if none has ended.
  std::optional<int> first_to_end(const std::vector<int>& ranks) const;
  /// Why a rank takes part in no more collectives, and what the user can do; "" if the rank may.
  std::string exit_reason(int rank) const;
  /// What the first few of `ranks` do: "rank 1 is outside of collectives, after ...; rank 2 ...".
  /// "" if all are on other machines.
  std::string what_they_do(const std::vector<int>& ranks) const;
  /// The ranks of `group` on this machine that have not begun the group's call `number`.
  std::vector<int> not_begun(const WatchedGroup& group, std::uint64_t number) const;
  /// The ranks of not_begun(), ranks that have begun the call and then failed, and ranks on other
  /// machines that have ended.
  std::vector<int> not_in(const WatchedGroup& group, std::uint64_t number) const;

  // The functions below read the state of ranks on other machines from the job's store. If the
  // store does not answer, these functions block for at most a second.

  /// The ranks of `group` that are on other machines.
  std::vector<int> away(const WatchedGroup& group) const;
  bool has_remote() const { return remote_ != nullptr; }
  /// Reads from the store which ranks have ended, at most once a second. Does not block.
  void look() const;
  /// Tells the other machines that a rank of this machine begins no more collectives.
  void announce_end(int rank) const;
  /// Tells the other machines that this rank waits in the call `number` of a group.
  void announce_wait(const WatchedGroup& group, std::uint64_t number) const;
  /// The ranks of `group` on other machines that have not called announce_wait() for call `number`
  /// or a later call; nullopt if the store does not answer.
  std::optional<std::vector<int>> not_waiting(const WatchedGroup& group,
                                              std::uint64_t number) const;

 private:
  struct Remote;

  const RecordPtr& memory(int rank) const { return records_[static_cast<std::size_t>(rank)]; }
  /// Whether this process can read the flight record of `rank`.
  bool is_near(int rank) const { return memory(rank) != nullptr; }
  std::string what_it_does(int rank) const;
  std::string remote_end(int rank) const;
  void note_end(flight::RankState state);

  WatchSettings settings_;
  std::vector<RecordPtr> records_;
  std::unique_ptr<Remote> remote_;  ///< state of ranks on other machines; nullptr if there are none
  std::unique_ptr<Watchdog> watchdog_;
};
using WorldWatchPtr = std::shared_ptr<WorldWatch>;

/// A collective that has begun, identified by its numbers in the flight record.
struct BegunCall {
  std::uint64_t order = 0;   ///< number of the call among all calls of this rank, from 1
  std::uint64_t number = 0;  ///< number of the call within its group; 0: making the group
};

/// Writes to the flight record whether a thread or the device now waits for the end of `call`.
/// Thread safe.
void set_waits(flight::Record& record, const BegunCall& call, bool waits);

/// GroupWatch records a process group's calls in this rank's flight record. One thread at a time.
class GroupWatch {
 public:
  GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks);

  /// Records the beginning of the group's next collective, in which this thread waits.
  BegunCall begin(const char* collective, std::string_view purpose = {});
  /// Records that this thread waits from now on until `call` is done.
  void waits(const BegunCall& call) { set_waits(world_->own(), call, true); }
  /// Records that the call is done or has failed, or that this thread no longer waits for the call.
  void leaves(const BegunCall& call) { set_waits(world_->own(), call, false); }
  /// Passes a call to Watchdog::await(), if Work::wait() has returned before the device has
  /// finished the call.
  void await_device(std::function<bool()> is_done, const BegunCall& call);

  /// The number of the group's last call that has begun.
  std::uint64_t number() const { return begun_ - 1; }
  /// The ranks that are known not to take part in the group's call `number`: see
  /// WorldWatch::not_in().
  std::vector<int> not_in(std::uint64_t number) const { return world_->not_in(*group_, number); }
  WorldWatch& world() const { return *world_; }
  const std::shared_ptr<const WatchedGroup>& group() const { return group_; }

 private:
  WorldWatchPtr world_;
  std::shared_ptr<const WatchedGroup> group_;
  /// The group's entry in the flight record; nullptr if the record is full.
  flight::GroupSlot* slot_;
  /// The number of calls that have begun; atomic, because threads that wait for earlier calls read
  /// it.
  std::atomic<std::uint64_t> begun_ = 0;
};

}  // namespace tessera::comm
TESSERA_API_END
