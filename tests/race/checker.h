// Finds accesses to device memory that are not ordered by events.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/detail/streams.h"
#include "testing/memory.h"

namespace tessera::race {

/// The index of an operator in a queue of work, counted from 1.
struct Epoch {
  std::size_t queue = 0;
  std::uint64_t time = 0;
};

/// For each queue, how many of its operators are done (vector clock: Mattern 1989; Fidge 1988).
class VectorClock {
 public:
  void join(const VectorClock& other) {
    times_.resize(std::max(times_.size(), other.times_.size()));
    for (std::size_t queue = 0; queue < other.times_.size(); ++queue) {
      times_[queue] = std::max(times_[queue], other.times_[queue]);
    }
  }
  Epoch tick(std::size_t queue) {
    times_.resize(std::max(times_.size(), queue + 1));
    return {queue, ++times_[queue]};
  }
  bool knows(const Epoch& epoch) const {
    return epoch.queue < times_.size() && epoch.time <= times_[epoch.queue];
  }

 private:
  std::vector<std::uint64_t> times_;
};

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

/// An operator in a queue. `place`: text such as "aten::mm in lane compute (unshard unit 'a')".
struct Action {
  Epoch epoch;
  std::string place;
};

/// Stores which operator last read and last wrote each piece of memory. allocate(), read() and
/// write() return descriptions of races with earlier accesses.
class MemoryMap {
 public:
  using Faults = std::vector<std::string>;

  /// Assigns the memory to the queue of `action`. A fault is an earlier use of the memory that
  /// `clock` does not contain.
  Faults allocate(Range range, const Action& action, const VectorClock& clock);
  /// Works also for memory whose allocation was not recorded.
  void free(Range range);
  Faults read(Range range, const Action& action, const VectorClock& clock);
  Faults write(Range range, const Action& action, const VectorClock& clock);

 private:
  struct Piece {
    std::uintptr_t end = 0;
    bool written = true;
    std::optional<Action> writer;
    std::vector<Action> readers;  ///< for each queue, the last operator that read the memory
  };
  /// An allocated block: its end, the queue that allocated the block, and where in the code.
  struct Block {
    std::uintptr_t end = 0;
    std::size_t owner = 0;
    std::string place;
  };
  /// The last operator that used a block of memory before the block was freed.
  struct Use {
    Action user;
    std::string memory;
  };
  using Pieces = std::map<std::uintptr_t, Piece>;

  void split(std::uintptr_t at);
  std::vector<Pieces::iterator> pieces(Range range);
  std::string memory_at(std::uintptr_t at) const;

  Pieces pieces_;
  std::map<std::uintptr_t, Block> blocks_;
  std::map<std::size_t, std::vector<Use>> freed_;  ///< key: index of the allocating queue
};

/// The state of all queues at an event, or at the end of a collective.
using Point = VectorClock;

/// Checks the memory accesses of one rank. Operators run immediately, as on a CPU, but the checker
/// assumes a device with concurrent queues of work: the streams (comm::Lane), the host, and the
/// collectives of each process group. Only events order the queues.  Faults: two accesses to the
/// same memory that no event orders; freed memory that a stream can allocate again before all
/// earlier uses have ended; and reads of memory that was not written since its allocation. Freed
/// memory is filled with NaN.
class RaceChecker final : public testing::AllocationWatcher {
 public:
  /// Sets the current stream, in which later operators run.
  void enter(comm::Lane lane) { lane_ = lane; }
  void note(const std::string& what) { note_ = what; }
  comm::Lane lane() const { return lane_; }

  Point record(comm::Lane lane) const;
  void wait(comm::Lane lane, const Point& point);
  /// Makes the host, and thus all work that the host issues later, wait for the point.
  void synchronize(const Point& point);

  /// Reports an operator of the current stream.
  void run(const std::string& name, const std::vector<Range>& reads,
           const std::vector<Range>& writes);
  /// Reports a collective, which starts after the current work of the current stream. Returns the
  /// end of the collective, for join().
  Point collective(const std::string& group, const std::string& name, const std::string& purpose,
                   const std::vector<Range>& reads, const std::vector<Range>& writes);
  /// Makes the current stream wait for the end of a collective.
  void join(const Point& point) { wait(lane_, point); }

  void allocated(void* data, std::size_t bytes) override;
  void freed(void* data, std::size_t bytes) override;
  /// Ignores all later allocations and frees.
  void stop() { stopped_ = true; }

  /// Returns the faults in the order in which they were found, without repetitions.
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  VectorClock& clock(std::size_t queue);
  std::size_t queue_of(const std::string& group);
  std::string place(const std::string& name, const std::string& where) const;
  void access(std::size_t queue, const std::string& place, const std::vector<Range>& reads,
              const std::vector<Range>& writes);
  void report(const MemoryMap::Faults& faults);

  std::recursive_mutex mutex_;
  comm::Lane lane_ = comm::Lane::kCompute;
  std::string note_;
  std::vector<VectorClock> clocks_;
  std::map<std::string, std::size_t> group_queues_;
  MemoryMap memory_;
  std::vector<std::string> faults_;
  bool stopped_ = false;
};

}  // namespace tessera::race
