#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

class Watchdog;

/// The memory of a flight record. The rank of the record writes this memory; other ranks on the
/// host map the memory.
class RecordMemory {
 public:
  /// Makes the memory of a new record: the file `path`, which is not deleted later, or, if `path`
  /// is "", anonymous memory (memfd), which is freed when the last process that maps it ends.
  /// Throws Error if the file cannot be made.
  static std::shared_ptr<RecordMemory> create(const std::string& path);
  /// Maps another rank's record by its handle(); nullptr if the record cannot be mapped.
  static std::shared_ptr<RecordMemory> open(const std::string& handle);

  RecordMemory(const RecordMemory&) = delete;
  RecordMemory& operator=(const RecordMemory&) = delete;
  ~RecordMemory();

  flight::Record& record() const { return *record_; }
  /// The handle that other processes pass to open(); valid while this object exists.
  const std::string& handle() const { return handle_; }

 private:
  RecordMemory(int fd, flight::Record* record) : fd_(fd), record_(record) {}

  int fd_;
  flight::Record* record_;
  std::string handle_;
};
using RecordPtr = std::shared_ptr<RecordMemory>;

struct WatchSettings {
  int rank = 0;
  /// The number of the world in its process, in the order in which the process makes its worlds.
  int world = 0;
  std::chrono::milliseconds limit{};  ///< a longer wait is reported; 0 disables reports
  std::chrono::milliseconds timeout{};
};

/// The folder TESSERA_RUN_DIR, in which the flight records of a job's ranks are files; "" if the
/// variable is not set.
std::string run_folder();
/// Unix time in nanoseconds.
std::int64_t unix_time();
/// Makes a record without calls for this rank of a world of `size` ranks: a file in `folder`, or in
/// memory if `folder` is "".
RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder);

/// A group of ranks whose calls are recorded.
struct WatchedGroup {
  std::uint64_t id = 0;  ///< the group's id, as in GroupSlot::id
  std::vector<int> ranks;
};

/// The flight record of this rank, and the state of the other ranks: read from their flight records
/// on the same host, and through the job's store on other hosts. Thread safe.
class WorldWatch {
 public:
  /// Starts no thread. `records`: the record of each rank, nullptr for ranks on other hosts.
  /// `store`: the job's store, for ranks on other hosts; nullptr if all ranks are on this host.
  WorldWatch(const WatchSettings& settings, std::vector<RecordPtr> records, detail::StorePtr store);
  WorldWatch(const WorldWatch&) = delete;
  WorldWatch& operator=(const WorldWatch&) = delete;
  /// Records that this rank begins no more collectives.
  ~WorldWatch();

  const WatchSettings& settings() const { return settings_; }
  flight::Record& own() const;
  Watchdog& watchdog() const { return *watchdog_; }
  void set_step(std::int64_t step) { own().step.store(step, std::memory_order_relaxed); }
  /// Makes ranks that wait for this rank fail.
  void give_up();
  /// Records that this rank begins no more collectives, and stops the watchdog.
  void end();
  /// Sets the function that returns NCCL's flight record, for the watchdog. To be called before the
  /// first group is made.
  void set_device_record(std::function<std::string()> record) {
    device_record_ = std::move(record);
  }
  const std::function<std::string()>& device_record() const { return device_record_; }

  /// Whether this process can read the flight record of `rank`.
  bool is_near(int rank) const { return memory(rank) != nullptr; }
  /// Whether `rank` may still arrive: false once the rank has ended or given up. Cheap.
  bool may_come(int rank) const;
  /// The rank of `ranks` that ended first; nullopt if none of them has ended.
  std::optional<int> first_to_end(const std::vector<int>& ranks) const;
  /// Why a rank will not arrive, and what the user can do; "" if the rank may still arrive.
  std::string exit_reason(int rank) const;
  /// The activity of the first few of these ranks: "rank 1 is outside of collectives, after ...;
  /// rank 2 ...". "" if all ranks are on other hosts.
  std::string what_they_do(const std::vector<int>& ranks) const;
  /// The ranks of `group` on this host that have not begun the group's call `number`.
  std::vector<int> not_begun(const WatchedGroup& group, std::uint64_t number) const;
  /// The ranks of not_begun(), the ranks that have begun the call and then failed, and the ranks on
  /// other hosts that have ended.
  std::vector<int> not_in(const WatchedGroup& group, std::uint64_t number) const;

  // The functions below learn the state of ranks on other hosts through the job's store. The store
  // may not answer, so no function blocks longer than a second.

  /// The ranks of `group` that are on other hosts.
  std::vector<int> away(const WatchedGroup& group) const;
  bool has_remote() const { return remote_ != nullptr; }
  /// Reads from the store which ranks have ended, at most once a second. Does not block.
  void look() const;
  /// Tells the other hosts that a rank of this host begins no more collectives.
  void announce_end(int rank) const;
  /// Tells the other hosts that this rank waits in the call `number` of a group.
  void announce_wait(const WatchedGroup& group, std::uint64_t number) const;
  /// The ranks of the group on other hosts that have announced no wait in this call or a later one;
  /// nullopt if the store does not answer.
  std::optional<std::vector<int>> not_waiting(const WatchedGroup& group,
                                              std::uint64_t number) const;

 private:
  struct Remote;

  const RecordPtr& memory(int rank) const { return records_[static_cast<std::size_t>(rank)]; }
  std::string what_it_does(int rank) const;
  std::string remote_end(int rank) const;
  void note_end(flight::RankState state);

  WatchSettings settings_;
  std::vector<RecordPtr> records_;
  std::unique_ptr<Remote> remote_;  ///< state of ranks on other hosts; nullptr if there are none
  std::function<std::string()> device_record_;
  std::unique_ptr<Watchdog> watchdog_;
};
using WorldWatchPtr = std::shared_ptr<WorldWatch>;

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
