#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "race/checker/vector_clock.h"

namespace tessera::race {

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
/// access, naming both places; empty: none. Memory that was allocated before counts as written, by
/// no action.
class MemoryMap {
 public:
  using Faults = std::vector<std::string>;

  /// A new life of the memory, which belongs to the queue of `action`. It may be any that the queue
  /// has freed: its users must be done, by `clock`.
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
  /// The last use of memory that its owner has not allocated from since.
  struct Use {
    Action user;
    std::string memory;
  };
  using Pieces = std::map<std::uintptr_t, Piece>;

  void split(std::uintptr_t at);
  /// The pieces that make up `range`, all of it.
  std::vector<Pieces::iterator> pieces(Range range);
  std::string memory_at(std::uintptr_t at) const;

  Pieces pieces_;
  std::map<std::uintptr_t, Block> blocks_;
  std::map<std::size_t, std::vector<Use>> freed_;  ///< by owner
};

}  // namespace tessera::race
