#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Caches at most `capacity` results of a pure function. When it is full, it removes an entry that
/// was not used recently, by the second-chance algorithm CLOCK (Corbato 1968). One thread at a
/// time.
template <class Key, class Value, class Hash = std::hash<Key>>
class BoundedCache {
 public:
  using ValuePtr = std::shared_ptr<const Value>;

  /// A cache of at most `capacity` entries; `capacity` must be at least 1.
  explicit BoundedCache(std::size_t capacity) : capacity_(capacity) {}

  /// Returns the value of `key`. If the value is not cached, computes it by `compute(key)` and
  /// stores it. If `compute` throws, the exception is passed on and nothing is stored.
  template <class Compute>
  ValuePtr get(const Key& key, const Compute& compute) {
    if (const auto found = entries_.find(key); found != entries_.end()) {
      found->second.used = true;
      return found->second.value;
    }
    auto value = std::make_shared<const Value>(compute(key));
    if (entries_.size() >= capacity_) {
      evict();
    }
    order_.push_back(&*entries_.try_emplace(key, Entry{value}).first);
    return value;
  }

  void clear() {
    order_.clear();
    entries_.clear();
  }
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    ValuePtr value;
    bool used = false;
  };
  using Entries = std::unordered_map<Key, Entry, Hash>;

  /// Removes the oldest entry that was not used since evict() last visited it.
  void evict() {
    while (std::exchange(order_.front()->second.used, false)) {
      order_.splice(order_.end(), order_, order_.begin());
    }
    entries_.erase(entries_.find(order_.front()->first));
    order_.pop_front();
  }

  const std::size_t capacity_;
  Entries entries_;
  // Entries of the cache, the oldest first.
  std::list<typename Entries::value_type*> order_;
};

}  // namespace tessera::detail
TESSERA_API_END
