#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "call_key.h"
#include "call_plan.h"
#include "tessera/dtensor/dispatch_cache.h"

namespace tessera::detail {

/// The plans of the calls that this thread made lately. Bounded: a full neighbourhood drops its
/// least recently used plan.
class CallCache {
 public:
  /// The cache of this thread.
  static CallCache& of_thread() {
    if (here_ == nullptr) [[unlikely]]
      make_here();
    return *here_;
  }

  CallCache() = default;
  CallCache(const CallCache&) = delete;
  CallCache& operator=(const CallCache&) = delete;
  ~CallCache() { here_ = nullptr; }

  /// For unboxed kernels to build a call's key in; as long as nothing else is dispatched.
  CallKey& key() { return key_; }

  CallPlan* find(const CallKey& key, std::uint64_t hash) {
    for (std::size_t i = 0; i < kNeighbourhood; ++i) {
      auto& candidate = slot(hash, i);
      if (!candidate.entry) return nullptr;
      if (candidate.hash == hash && candidate.entry->is_for(key.words())) {
        candidate.last_use = ++uses_;
        return &candidate.entry->plan;
      }
    }
    return nullptr;
  }
  CallPlan& insert(const CallKey& key, std::uint64_t hash, CallPlan plan);

  DispatchCacheStatistics statistics() const;
  void clear();

 private:
  static constexpr std::size_t kSlots = 8192;
  static constexpr std::size_t kNeighbourhood = 8;

  /// A key's specs are held by the plan's inputs, so that their addresses stay theirs.
  struct Entry {
    std::vector<std::uint64_t> words;
    CallPlan plan;

    /// A loop of its own: the words are few.
    bool is_for(std::span<const std::uint64_t> key) const {
      if (words.size() != key.size()) return false;
      std::uint64_t difference = 0;
      for (std::size_t i = 0; i < key.size(); ++i) difference |= words[i] ^ key[i];
      return difference == 0;
    }
  };
  struct Slot {
    std::uint64_t hash = 0;
    std::uint64_t last_use = 0;
    std::unique_ptr<Entry> entry;
  };

  Slot& slot(std::uint64_t hash, std::size_t i) { return slots_[(hash + i) % kSlots]; }

  static void make_here();
  // A plain pointer, so that finding it costs one address and no guard.
  static inline constinit thread_local CallCache* here_ = nullptr;

  CallKey key_;
  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::uint64_t uses_ = 0;  ///< hits and misses
  std::uint64_t misses_ = 0;
};

}  // namespace tessera::detail
