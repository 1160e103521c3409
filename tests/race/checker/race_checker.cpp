#include "race/checker/race_checker.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tessera::race {
namespace {

/// The lanes come first, then the host, then the groups.
constexpr std::size_t kHost = 4;
constexpr std::size_t kFirstGroup = kHost + 1;

std::size_t queue_of_lane(comm::Lane lane) {
  return static_cast<std::size_t>(lane);
}

Range range_of(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + bytes};
}

double bytes_of(const std::vector<Range>& ranges) {
  double bytes = 0;
  for (const Range& range : ranges) {
    bytes += static_cast<double>(range.end - range.begin);
  }
  return bytes;
}

/// As a float of any type: NaN.
void poison(void* data, std::size_t bytes) {
  std::memset(data, 0xFF, bytes);
}

}  // namespace

VectorClock& RaceChecker::clock(std::size_t queue) {
  clocks_.resize(std::max(clocks_.size(), std::max(queue + 1, kFirstGroup)));
  return clocks_[queue];
}

std::size_t RaceChecker::queue_of(const std::string& group) {
  return group_queues_.try_emplace(group, kFirstGroup + group_queues_.size()).first->second;
}

std::string RaceChecker::place(const std::string& name, const std::string& where) const {
  return name + " in " + where + (note_.empty() ? "" : " (after '" + note_ + "')");
}

Point RaceChecker::record(comm::Lane lane) const {
  const std::size_t queue = queue_of_lane(lane);
  return {queue < clocks_.size() ? clocks_[queue] : VectorClock{}, timeline_.now(queue)};
}

void RaceChecker::wait(comm::Lane lane, const Point& point) {
  clock(queue_of_lane(lane)).join(point.clock);
  timeline_.wait(queue_of_lane(lane), point.moment);
}

void RaceChecker::synchronize(const Point& point) {
  clock(kHost).join(point.clock);
  timeline_.wait(kHost, point.moment);
}

void RaceChecker::report(const MemoryMap::Faults& faults) {
  for (const std::string& fault : faults) {
    if (std::ranges::find(faults_, fault) == faults_.end()) {
      faults_.push_back(fault);
    }
  }
}

void RaceChecker::access(std::size_t queue, const std::string& place,
                         const std::vector<Range>& reads, const std::vector<Range>& writes) {
  VectorClock& known = clock(queue);
  const Action action{known.tick(queue), place};
  for (const Range& range : reads) {
    report(memory_.read(range, action, known));
  }
  for (const Range& range : writes) {
    report(memory_.write(range, action, known));
  }
}

void RaceChecker::run(const std::string& name, const std::vector<Range>& reads,
                      const std::vector<Range>& writes, double microseconds) {
  const std::lock_guard lock(mutex_);
  const std::size_t queue = queue_of_lane(lane_);
  // What the host has waited for comes before all that it issues.
  clock(queue).join(clock(kHost));
  timeline_.wait(queue, timeline_.now(kHost));
  access(queue, place(name, std::string("lane ") + comm::to_string(lane_)), reads, writes);
  timeline_.run(queue, name, note_, microseconds);
}

Point RaceChecker::collective(const std::string& group, const std::string& name,
                              const std::string& purpose, const std::vector<Range>& reads,
                              const std::vector<Range>& writes) {
  const std::lock_guard lock(mutex_);
  const std::size_t lane = queue_of_lane(lane_);
  // A group's collectives share the network, but only those of one lane are in its order.
  const std::size_t network = queue_of(group);
  const std::size_t queue = queue_of(group + " of " + comm::to_string(lane_));
  const VectorClock begin = clock(lane);
  clock(queue).join(begin);
  timeline_.wait(network, timeline_.now(lane));
  const std::string what = purpose.empty() ? name : name + " of " + purpose;
  access(queue, what + " over group '" + group + "'", reads, writes);
  timeline_.run(network, what, group,
                timeline_.costs().collective(std::max(bytes_of(reads), bytes_of(writes))));
  return {clock(queue), timeline_.now(network)};
}

void RaceChecker::allocated(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (stopped_ || bytes == 0) {
    return;
  }
  poison(data, bytes);
  const std::size_t queue = queue_of_lane(lane_);
  VectorClock& known = clock(queue);
  const Action action{known.tick(queue),
                      place("memory", std::string("lane ") + comm::to_string(lane_))};
  report(memory_.allocate(range_of(data, bytes), action, known));
}

void RaceChecker::freed(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0) {
    return;
  }
  if (!stopped_) {
    memory_.free(range_of(data, bytes));
  }
  poison(data, bytes);
}

}  // namespace tessera::race
