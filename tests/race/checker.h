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

/// A point in a queue of work: the number of operators that had begun in the queue.
struct Epoch {
  std::size_t queue = 0;
  std::uint64_t time = 0;
};

/// How much work of each queue is done (a vector clock: Mattern 1989; Fidge 1988).
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

/// The memory addresses [begin, end).
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

/// Describes an action in a lane (stream) as "aten::mm in lane compute (unshard unit 'a')".
struct Action {
  Epoch epoch;
  std::string place;
};

/// Stores the last read and the last write of all memory. Each function returns the faults of a new
/// access, with both actions. Memory that is older than the first action has no writer.
class MemoryMap {
 public:
  using Faults = std::vector<std::string>;

  /// Allocates memory for the queue of `action`. It is a fault if `clock` does not contain all
  /// earlier uses of the memory.
  Faults allocate(Range range, const Action& action, const VectorClock& clock);
  /// Records that memory was freed, even if its allocation was not recorded.
  void free(Range range);
  Faults read(Range range, const Action& action, const VectorClock& clock);
  Faults write(Range range, const Action& action, const VectorClock& clock);

 private:
  struct Piece {
    std::uintptr_t end = 0;
    bool written = true;
    std::optional<Action> writer;
    std::vector<Action> readers;  ///< the last action of each queue that read this memory
  };
  /// An allocated block: its end, the queue that allocated it, and the place in the code.
  struct Block {
    std::uintptr_t end = 0;
    std::size_t owner = 0;
    std::string place;
  };
  /// The last action that used a block of memory, which is now free.
  struct Use {
    Action user;
    std::string memory;
  };
  using Pieces = std::map<std::uintptr_t, Piece>;

  void split(std::uintptr_t at);
  /// Returns the recorded pieces of memory that cover `range`.
  std::vector<Pieces::iterator> pieces(Range range);
  std::string memory_at(std::uintptr_t at) const;

  Pieces pieces_;
  std::map<std::uintptr_t, Block> blocks_;
  std::map<std::size_t, std::vector<Use>> freed_;  ///< key: the queue that owned the memory
};

/// The work that is done when an event is reached or a collective has ended.
using Point = VectorClock;

/// Checks the memory accesses of one rank. Queues of work are the lanes (streams), the host, and
/// one queue for each process group's collectives. Operators run immediately, as on a CPU. The
/// checker examines the order that events would enforce if the lanes ran concurrently.
///
/// Faults are: two accesses to the same memory that no event orders; freed memory that its lane can
/// use again without waiting for the end of all earlier uses; and reads of memory that was not
/// written since its allocation. Freed memory is filled with NaN.
class RaceChecker final : public testing::AllocationWatcher {
 public:
  /// Sets the current lane (stream). All later work runs in this lane.
  void enter(comm::Lane lane) { lane_ = lane; }
  void note(const std::string& what) { note_ = what; }
  comm::Lane lane() const { return lane_; }

  Point record(comm::Lane lane) const;
  void wait(comm::Lane lane, const Point& point);
  /// Makes the host wait for the point, and all work that the host issues later.
  void synchronize(const Point& point);

  /// Records an operator in the current lane (stream).
  void run(const std::string& name, const std::vector<Range>& reads,
           const std::vector<Range>& writes);
  /// Records a collective in the queue of its process group. The collective begins after all work
  /// of the current lane. Returns the end of the collective.
  Point collective(const std::string& group, const std::string& name, const std::string& purpose,
                   const std::vector<Range>& reads, const std::vector<Range>& writes);
  /// Makes the current lane (stream) wait for a collective.
  void join(const Point& point) { wait(lane_, point); }

  void allocated(void* data, std::size_t bytes) override;
  void freed(void* data, std::size_t bytes) override;
  /// Makes the checker ignore later allocations and frees of memory.
  void stop() { stopped_ = true; }

  /// Returns the distinct faults, in the order in which the checker found them.
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
