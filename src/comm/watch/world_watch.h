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
#include "tessera/core/detail/flight_report.h"
#include "tessera/export.h"
#include "watch/remote_peers.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// The memory of a flight record. Its rank writes it; other ranks of the host map it.
class RecordMemory {
 public:
  /// A file `path`, which stays; or, for "", anonymous memory (memfd) that ends with the last
  /// process that maps it. Throws Error if the file cannot be made.
  static std::shared_ptr<RecordMemory> create(const std::string& path);
  /// Maps the record of another rank by its handle(); nullptr if that fails.
  static std::shared_ptr<RecordMemory> open(const std::string& handle);

  RecordMemory(const RecordMemory&) = delete;
  RecordMemory& operator=(const RecordMemory&) = delete;
  ~RecordMemory();

  flight::Record& record() const { return *record_; }
  /// For open(), while this object lives.
  const std::string& handle() const { return handle_; }

 private:
  RecordMemory(int fd, flight::Record* record) : fd_(fd), record_(record) {}

  int fd_;
  flight::Record* record_;
  std::string handle_;
};
using RecordPtr = std::shared_ptr<RecordMemory>;

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

class Watchdog;

struct WatchSettings {
  int rank = 0;
  /// Counts the worlds of a process, in the order in which every rank makes them.
  int world = 0;
  std::chrono::milliseconds limit{};  ///< a longer wait is reported; 0: none is
  std::chrono::milliseconds timeout{};
  std::string folder;  ///< where reports go; "": one below the folder for temporary files
};

/// TESSERA_RUN_DIR, where the flight records of a job's ranks are files from the start; "" if it is
/// not set.
std::string run_folder();
/// "; look at what they do instead" to follow what ranks do; "" if that ends in an advice already.
std::string advice_behind(const std::string& what_they_do);
/// A record for this rank of `size`, as yet without calls: a file in `folder`, or in memory for "".
RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder);

/// The flight record of this rank, and the state of the other ranks: by their flight records on the
/// same host, through the job's store on other hosts. Thread safe.
class WorldWatch {
 public:
  /// Starts nothing. `records`: of each rank, nullptr for those on other hosts. `remote`: nullptr
  /// if there are none.
  WorldWatch(const WatchSettings& settings, std::vector<RecordPtr> records,
             std::unique_ptr<RemotePeers> remote);
  WorldWatch(const WorldWatch&) = delete;
  WorldWatch& operator=(const WorldWatch&) = delete;
  /// Records that this rank begins no more collectives.
  ~WorldWatch();

  const WatchSettings& settings() const { return settings_; }
  flight::Record& own() const;
  RemotePeers* remote() const { return remote_.get(); }
  void set_step(std::int64_t step) { own().step.store(step, std::memory_order_relaxed); }
  /// Makes peers that wait for this rank fail.
  void give_up();
  /// Records that this rank begins no more collectives, and stops the watchdog.
  void end();
  /// Sets the function that returns NCCL's flight record, for the watchdog. Call it before the
  /// first group is made.
  void set_device_record(std::function<std::string()> record) {
    device_record_ = std::move(record);
  }
  const std::function<std::string()>& device_record() const { return device_record_; }

  /// False once a rank has ended or given up. Cheap.
  bool may_come(int rank) const;
  /// Whether its process is stopped, as by SIGSTOP. False for a rank of another host.
  bool is_stopped(int rank) const;
  /// The first of these ranks that ended; nullopt: none has.
  std::optional<int> first_to_end(const std::vector<int>& ranks) const;
  /// Why a rank will not come, and what to do; "" if it may come.
  std::string exit_reason(int rank) const;
  /// The records of this host's ranks.
  std::vector<flight::RankReport> reports() const;
  /// The same with the kernel's status of their threads. Takes a quarter of a second.
  std::vector<flight::RankReport> observe() const;
  /// "rank 1 sleeps outside of collectives, after ...; rank 2 ...", for the first few.
  std::string what_they_do(const std::vector<int>& ranks) const;

  /// Writes the records of this host's ranks to the folder of the settings, for `tessera-run
  /// --explain`. Does nothing if they are files already.
  void write_records() const;
  /// A line for each rank of another host.
  std::vector<std::string> answers_of_other_hosts(std::int64_t question,
                                                  std::chrono::milliseconds most) const;

  /// How many calls of a group, by its id, a rank has begun; nullopt if its record is out of reach.
  std::optional<std::uint64_t> calls_begun(int rank, std::uint64_t group) const;
  Watchdog& watchdog() const { return *watchdog_; }

 private:
  WatchSettings settings_;
  std::vector<RecordPtr> records_;
  std::unique_ptr<RemotePeers> remote_;
  std::function<std::string()> device_record_;
  std::unique_ptr<Watchdog> watchdog_;
};
using WorldWatchPtr = std::shared_ptr<WorldWatch>;

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
