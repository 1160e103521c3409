#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "race/checker.h"
#include "tessera/comm/detail/streams.h"

namespace tessera::race {
namespace {

/// An operator that copies two tensors at once may copy a gap of at most this many bytes between
/// them. FSDP pads tensors to 64 bytes, so FSDP's gaps are smaller.
constexpr std::uintptr_t kLargestGap = 256;

/// Whether memory filled by poison() is unchanged. If it has changed, a kernel has written through
/// a raw pointer, unseen by the checker.
bool is_untouched(Range range) {
  const auto* begin = reinterpret_cast<const unsigned char*>(range.begin);
  return std::all_of(begin, begin + (range.end - range.begin),
                     [](unsigned char byte) { return byte == 0xFF; });
}

}  // namespace

void MemoryMap::split(std::uintptr_t at) {
  auto after = pieces_.upper_bound(at);
  if (after == pieces_.begin()) {
    return;
  }
  const auto piece = std::prev(after);
  if (piece->first < at && at < piece->second.end) {
    pieces_.emplace_hint(after, at, piece->second);
    piece->second.end = at;
  }
}

std::vector<MemoryMap::Pieces::iterator> MemoryMap::pieces(Range range) {
  split(range.begin);
  split(range.end);
  std::vector<Pieces::iterator> found;
  std::uintptr_t at = range.begin;
  auto next = pieces_.lower_bound(at);
  while (at < range.end) {
    // The memory at `at` has no recorded accesses yet.
    if (next == pieces_.end() || next->first > at) {
      Piece unseen;
      unseen.end = next == pieces_.end() ? range.end : std::min(range.end, next->first);
      next = pieces_.emplace_hint(next, at, unseen);
    }
    at = next->second.end;
    found.push_back(next++);
  }
  return found;
}

std::string MemoryMap::memory_at(std::uintptr_t at) const {
  const auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin() || std::prev(after)->second.end <= at) {
    return "memory";
  }
  return std::prev(after)->second.place;
}

MemoryMap::Faults MemoryMap::allocate(Range range, const Action& action, const VectorClock& clock) {
  Faults faults;
  for (const Use& use : std::exchange(freed_[action.epoch.queue], {})) {
    if (!clock.knows(use.user.epoch)) {
      faults.push_back(use.memory + " was freed, and is taken by " + action.place + " before " +
                       use.user.place + " is done with it; no event orders them");
    }
  }
  for (const auto& piece : pieces(range)) {
    piece->second = {.end = piece->second.end, .written = false, .writer = {}, .readers = {}};
  }
  blocks_[range.begin] = {range.end, action.epoch.queue, action.place};
  return faults;
}

void MemoryMap::free(Range range) {
  const auto block = blocks_.find(range.begin);
  const std::string memory = memory_at(range.begin);
  for (const auto& piece : pieces(range)) {
    if (block != blocks_.end()) {
      std::vector<Use>& uses = freed_[block->second.owner];
      for (const Action& reader : piece->second.readers) {
        uses.push_back({reader, memory});
      }
      if (piece->second.writer) {
        uses.push_back({*piece->second.writer, memory});
      }
    }
    pieces_.erase(piece);
  }
  if (block != blocks_.end()) {
    blocks_.erase(block);
  }
}

MemoryMap::Faults MemoryMap::read(Range range, const Action& action, const VectorClock& clock) {
  Faults faults;
  for (const auto& found : pieces(range)) {
    Piece& piece = found->second;
    const Range unwritten{found->first, piece.end};
    if (!piece.written && piece.end - found->first >= kLargestGap && is_untouched(unwritten)) {
      faults.push_back(action.place + " reads what nobody has written: " + memory_at(found->first));
    }
    if (piece.writer && !clock.knows(piece.writer->epoch)) {
      faults.push_back(action.place + " reads what " + piece.writer->place +
                       " writes; no event orders them");
    }
    std::erase_if(piece.readers,
                  [&](const Action& reader) { return reader.epoch.queue == action.epoch.queue; });
    piece.readers.push_back(action);
  }
  return faults;
}

MemoryMap::Faults MemoryMap::write(Range range, const Action& action, const VectorClock& clock) {
  Faults faults;
  for (const auto& found : pieces(range)) {
    Piece& piece = found->second;
    if (piece.writer && !clock.knows(piece.writer->epoch)) {
      faults.push_back(action.place + " writes what " + piece.writer->place +
                       " writes; no event orders them");
    }
    for (const Action& reader : piece.readers) {
      if (!clock.knows(reader.epoch)) {
        faults.push_back(action.place + " writes what " + reader.place +
                         " reads; no event orders them");
      }
    }
    piece.written = true;
    piece.writer = action;
    piece.readers.clear();
  }
  return faults;
}

namespace {

/// Indices of queues: first the streams (comm::Lane), then the host, then the process groups.
constexpr std::size_t kHost = 4;
constexpr std::size_t kFirstGroup = kHost + 1;

std::size_t queue_of_lane(comm::Lane lane) {
  return static_cast<std::size_t>(lane);
}

Range range_of(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + bytes};
}

/// Fills memory with bytes 0xFF, which are NaN in all floating-point types.
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
  return queue < clocks_.size() ? clocks_[queue] : VectorClock{};
}

void RaceChecker::wait(comm::Lane lane, const Point& point) {
  clock(queue_of_lane(lane)).join(point);
}

void RaceChecker::synchronize(const Point& point) {
  clock(kHost).join(point);
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
                      const std::vector<Range>& writes) {
  const std::lock_guard lock(mutex_);
  const std::size_t queue = queue_of_lane(lane_);
  // Work that the host has waited for comes before all later work of the current stream.
  clock(queue).join(clock(kHost));
  access(queue, place(name, std::string("lane ") + comm::to_string(lane_)), reads, writes);
}

Point RaceChecker::collective(const std::string& group, const std::string& name,
                              const std::string& purpose, const std::vector<Range>& reads,
                              const std::vector<Range>& writes) {
  const std::lock_guard lock(mutex_);
  const std::size_t lane = queue_of_lane(lane_);
  // A process group orders only collectives of the same stream, so each stream has its own queue.
  const std::size_t queue = queue_of(group + " of " + comm::to_string(lane_));
  const VectorClock begin = clock(lane);
  clock(queue).join(begin);
  const std::string what = purpose.empty() ? name : name + " of " + purpose;
  access(queue, what + " over group '" + group + "'", reads, writes);
  return clock(queue);
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
