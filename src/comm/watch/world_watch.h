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

/// The memory of a flight record. Its rank writes it; other ranks on the host map it.
class RecordMemory {
 public:
  /// Makes the file `path`, which stays; or, for "", anonymous memory (memfd) that is freed with
  /// the last process that maps it. Throws Error if the file cannot be made.
  static std::shared_ptr<RecordMemory> create(const std::string& path);
  /// Maps another rank's record by its handle(); nullptr if that fails.
  static std::shared_ptr<RecordMemory> open(const std::string& handle);

  RecordMemory(const RecordMemory&) = delete;
  RecordMemory& operator=(const RecordMemory&) = delete;
  ~RecordMemory();

  flight::Record& record() const { return *record_; }
  /// The handle for open(), valid while this object exists.
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
  /// The number of the world in its process, in the order in which the process makes its worlds.
  int world = 0;
  std::chrono::milliseconds limit{};  ///< a longer wait is reported; 0 disables reports
  std::chrono::milliseconds timeout{};
  std::string folder;  ///< folder for reports; "": a folder below that for temporary files
};

/// The folder TESSERA_RUN_DIR, in which the flight records of a job's ranks are files from the
/// start; "" if it is not set.
std::string run_folder();
/// "; look at what they do instead", to append to a description of the ranks' activity; "" if the
/// description already ends with advice.
std::string advice_behind(const std::string& what_they_do);
/// Makes a record without calls for this rank of a world of `size` ranks: a file in `folder`, or in
/// memory if `folder` is "".
RecordPtr make_record(const WatchSettings& settings, int size, const std::string& folder);

/// The flight record of this rank, and the state of the other ranks: read from their flight records
/// on the same host, and through the job's store on other hosts. Thread safe.
class WorldWatch {
 public:
  /// Starts no thread. `records`: each rank's record, nullptr for ranks on other hosts. `remote`:
  /// nullptr if all ranks are on this host.
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

  /// False once the rank has ended or given up. Cheap.
  bool may_come(int rank) const;
  /// Whether the rank's process is stopped, for example by SIGSTOP. False for a rank on another
  /// host.
  bool is_stopped(int rank) const;
  /// The first of these ranks that ended; nullopt if none has.
  std::optional<int> first_to_end(const std::vector<int>& ranks) const;
  /// Why a rank will not arrive, and what to do; "" if it may still arrive.
  std::string exit_reason(int rank) const;
  /// The records of the ranks on this host.
  std::vector<flight::RankReport> reports() const;
  /// Like reports(), with the kernel's status of the ranks' threads. Takes a quarter of a second.
  std::vector<flight::RankReport> observe() const;
  /// The activity of the first few ranks: "rank 1 sleeps outside of collectives, after ...; rank 2
  /// ...".
  std::string what_they_do(const std::vector<int>& ranks) const;

  /// Writes the records of this host's ranks to the folder in the settings, for `tessera-run
  /// --explain`. Does nothing if the records are already files.
  void write_records() const;
  /// One line for each rank on another host.
  std::vector<std::string> answers_of_other_hosts(std::int64_t question,
                                                  std::chrono::milliseconds most) const;

  /// The number of calls of a group (by its id) that a rank has begun; nullopt if the rank's record
  /// is out of reach.
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
