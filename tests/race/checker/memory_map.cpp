#include "race/checker/memory_map.h"

#include <algorithm>
#include <utility>

namespace tessera::race {
namespace {

/// Gaps between tensors, which are copied along, are smaller: FSDP rounds to 64 bytes for each of
/// the ranks that keep a piece.
constexpr std::uintptr_t kLargestGap = 256;

/// Memory is filled with ones when it is allocated. A kernel that was called without the dispatcher
/// has written without a word.
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
    // A gap: memory not seen yet.
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

}  // namespace tessera::race
