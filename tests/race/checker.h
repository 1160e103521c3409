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

/// Identifies an operator by the index of its queue and by its position (from 1) in this queue.
struct Epoch {
  std::size_t queue = 0;
  std::uint64_t time = 0;
};

/// A vector clock (Mattern 1989; Fidge 1988): the number of completed operators in each queue.
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

/// An operator, and its description in messages: "aten::mm in lane compute (unshard unit 'a')".
struct Action {
  Epoch epoch;
  std::string place;
};

/// The operators that last read and wrote each piece of memory. allocate(), read() and write()
/// return a description of each race that they find.
class MemoryMap {
 public:
  using Faults = std::vector<std::string>;

  /// Records that the queue of `action` allocates memory. An earlier use of this memory that is not
  /// completed according to `clock` is a race.
  Faults allocate(Range range, const Action& action, const VectorClock& clock);
  /// Records that `range` is freed. The allocation of `range` need not have been recorded.
  void free(Range range);
  Faults read(Range range, const Action& action, const VectorClock& clock);
  Faults write(Range range, const Action& action, const VectorClock& clock);

 private:
  struct Piece {
    std::uintptr_t end = 0;
    bool written = true;
    std::optional<Action> writer;
    std::vector<Action> readers;  ///< for each queue, the last operator that read this piece
  };
  /// An allocated memory block: its end, and the queue and the operator that allocated it.
  struct Block {
    std::uintptr_t end = 0;
    std::size_t owner = 0;
    std::string place;
  };
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

/// An event, or a collective's end: how much work each queue has completed then.
using Point = VectorClock;

/// Finds races in one rank's memory accesses. Operators run immediately on the CPU, but are checked
/// as if each stream (comm::Lane), the host, and each process group ran concurrently. Races are
/// unordered accesses, allocations of memory in use, and reads of memory that was never written.
/// Freed memory is filled with NaN.
class RaceChecker final : public testing::AllocationWatcher {
 public:
  /// Makes `lane` the current stream. Later operators run in the current stream.
  void enter(comm::Lane lane) { lane_ = lane; }
  void note(const std::string& what) { note_ = what; }
  comm::Lane lane() const { return lane_; }

  Point record(comm::Lane lane) const;
  void wait(comm::Lane lane, const Point& point);
  /// Makes the host wait for `point`. Everything that the host issues later comes after `point`.
  void synchronize(const Point& point);

  void run(const std::string& name, const std::vector<Range>& reads,
           const std::vector<Range>& writes);
  /// Records a collective that starts after all earlier work of the current stream. Returns the
  /// point at which the collective ends.
  Point collective(const std::string& group, const std::string& name, const std::string& purpose,
                   const std::vector<Range>& reads, const std::vector<Range>& writes);
  /// Makes the current stream wait for the end of a collective.
  void join(const Point& point) { wait(lane_, point); }

  void allocated(void* data, std::size_t bytes) override;
  void freed(void* data, std::size_t bytes) override;
  /// Ignores all later allocations and frees.
  void stop() { stopped_ = true; }

  /// Returns descriptions of the races in the order of discovery. Equal descriptions occur once.
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
