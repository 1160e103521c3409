#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "call_key.h"
#include "call_plan.h"

namespace tessera::detail {

/// The plans of the calls that this thread made lately. Bounded: a full neighbourhood drops its
/// least recently used plan.
class CallCache {
 public:
  /// The cache of this thread.
  static CallCache& of_thread();

  CallPlan* find(const CallKey& key, std::uint64_t hash);
  CallPlan& insert(const CallKey& key, std::uint64_t hash, CallPlan plan);

 private:
  static constexpr std::size_t kSlots = 8192;
  static constexpr std::size_t kNeighbourhood = 8;

  /// A key's specs are held by the plan's inputs, so that their addresses stay theirs.
  struct Entry {
    std::vector<std::uint64_t> words;
    CallPlan plan;
  };
  struct Slot {
    std::uint64_t hash = 0;
    std::uint64_t last_use = 0;
    std::unique_ptr<Entry> entry;
  };

  Slot& slot(std::uint64_t hash, std::size_t i) { return slots_[(hash + i) % kSlots]; }

  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::uint64_t uses_ = 0;
};

}  // namespace tessera::detail
