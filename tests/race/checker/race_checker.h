#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "race/checker/memory_map.h"
#include "race/checker/timeline.h"
#include "race/checker/vector_clock.h"
#include "tessera/comm/streams.h"
#include "testing/memory/watched_allocator.h"

namespace tessera::race {

/// The end of what a queue had when it was recorded.
struct Point {
  VectorClock clock;
  Moment moment;
};

/// Follows one rank: queues of work (the lanes, the host, and one for each group's collectives),
/// the memory that they use, and what orders them. Operators run at once, as on a CPU; what matters
/// is the order that events would force on lanes that run concurrently. Also draws the timeline.
///
/// It finds an access that no event orders with another of the same memory; memory that was freed
/// and that its lane may allocate again before it has waited for its users; and a read of
/// memory that was not written since it was allocated. Freed memory is filled with NaN.
class RaceChecker final : public testing::AllocationWatcher {
 public:
  explicit RaceChecker(Costs costs = {}) : timeline_(costs) {}

  /// The lane of what is issued from now on.
  void enter(comm::Lane lane) { lane_ = lane; }
  void note(const std::string& what) { note_ = what; }
  comm::Lane lane() const { return lane_; }

  Point record(comm::Lane lane) const;
  void wait(comm::Lane lane, const Point& point);
  /// The host waits: so does what it issues from then on.
  void synchronize(const Point& point);

  /// An operator in the current lane.
  void run(const std::string& name, const std::vector<Range>& reads,
           const std::vector<Range>& writes, double microseconds);
  /// A collective in the queue of its group, which begins after what the current lane has so far.
  /// `purpose`: whose it is. The point: its end.
  Point collective(const std::string& group, const std::string& name, const std::string& purpose,
                   const std::vector<Range>& reads, const std::vector<Range>& writes);
  /// The current lane waits for a collective.
  void join(const Point& point) { wait(lane_, point); }

  void allocated(void* data, std::size_t bytes) override;
  void freed(void* data, std::size_t bytes) override;
  /// What is freed later is not looked at.
  void stop() { stopped_ = true; }

  /// Each once, in the order in which they were found.
  const std::vector<std::string>& faults() const { return faults_; }
  Timeline& timeline() { return timeline_; }

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
  Timeline timeline_;
  std::vector<std::string> faults_;
  bool stopped_ = false;
};

}  // namespace tessera::race
