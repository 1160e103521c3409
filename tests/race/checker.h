// Finds accesses to device memory that no event orders.
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

/// A moment of one queue of work: the number of its operators that had begun.
struct Epoch {
  std::size_t queue = 0;
  std::uint64_t time = 0;
};

/// For each queue, the work that this queue knows to be done (Mattern 1989; Fidge 1988).
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

/// Addresses [begin, end).
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

/// Something that a queue has done: "aten::mm in lane compute (unshard unit 'a')".
struct Action {
  Epoch epoch;
  std::string place;
};

/// The last actions that have read and written memory. Each function returns the faults of an
/// access, which name both places; empty if there are none. Earlier memory counts as written by no
/// action.
class MemoryMap {
 public:
  using Faults = std::vector<std::string>;

  /// Memory is allocated again, for the queue of `action`. Its former users must be done, by
  /// `clock`.
  Faults allocate(Range range, const Action& action, const VectorClock& clock);
  /// Memory whose allocation was not seen has no owner.
  void free(Range range);
  Faults read(Range range, const Action& action, const VectorClock& clock);
  Faults write(Range range, const Action& action, const VectorClock& clock);

 private:
  struct Piece {
    std::uintptr_t end = 0;
    bool written = true;
    std::optional<Action> writer;
    std::vector<Action> readers;  ///< since then, the last of each queue
  };
  /// A block: its end, the queue that allocated it, and where.
  struct Block {
    std::uintptr_t end = 0;
    std::size_t owner = 0;
    std::string place;
  };
  /// The last use of memory that its owner has freed and not allocated again.
  struct Use {
    Action user;
    std::string memory;
  };
  using Pieces = std::map<std::uintptr_t, Piece>;

  void split(std::uintptr_t at);
  /// The pieces that make up the whole `range`.
  std::vector<Pieces::iterator> pieces(Range range);
  std::string memory_at(std::uintptr_t at) const;

  Pieces pieces_;
  std::map<std::uintptr_t, Block> blocks_;
  std::map<std::size_t, std::vector<Use>> freed_;  ///< by owner
};

/// The end of a queue's work at the time of the record.
using Point = VectorClock;

/// Follows one rank: queues of work (the lanes, the host, and one for each group's collectives),
/// the memory that they use, and what orders them. Operators run at once, as on a CPU; what matters
/// is the order that events would force on lanes that run concurrently.
///
/// It finds an access that no event orders with another of the same memory; memory that was freed
/// and that its lane may allocate again before it has waited for its users; and a read of
/// memory that was not written since it was allocated. Freed memory is filled with NaN.
class RaceChecker final : public testing::AllocationWatcher {
 public:
  /// Sets the lane of all later work.
  void enter(comm::Lane lane) { lane_ = lane; }
  void note(const std::string& what) { note_ = what; }
  comm::Lane lane() const { return lane_; }

  Point record(comm::Lane lane) const;
  void wait(comm::Lane lane, const Point& point);
  /// The host waits for the point, and so does all its later work.
  void synchronize(const Point& point);

  /// An operator in the current lane.
  void run(const std::string& name, const std::vector<Range>& reads,
           const std::vector<Range>& writes);
  /// A collective in the queue of its group, which begins after the work of the current lane so
  /// far. Returns its end.
  Point collective(const std::string& group, const std::string& name, const std::string& purpose,
                   const std::vector<Range>& reads, const std::vector<Range>& writes);
  /// The current lane waits for a collective.
  void join(const Point& point) { wait(lane_, point); }

  void allocated(void* data, std::size_t bytes) override;
  void freed(void* data, std::size_t bytes) override;
  /// Memory that is freed later is not checked.
  void stop() { stopped_ = true; }

  /// The faults, each once, in the order in which they were found.
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  VectorClock& clock(std::size_t queue);
  std::size_t queue_of(const std::string& group);
  std::string place(const std::string& name, const std::string& where) const;
  void access(std::size_t queue, const std::string& place, const std::vector<Range>& reads,
              const std::vector<Range>& writes);
  void report(const MemoryMap::Faults& faults);

  std::recursive_mutex mutex_;  ///< other threads free
  comm::Lane lane_ = comm::Lane::kCompute;
  std::string note_;
  std::vector<VectorClock> clocks_;
  std::map<std::string, std::size_t> group_queues_;
  MemoryMap memory_;
  std::vector<std::string> faults_;
  bool stopped_ = false;
};

}  // namespace tessera::race
