#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Caches at most `capacity` results of a pure function. When it is full, it removes an entry that
/// was not used recently, by the second-chance algorithm CLOCK (Corbato 1968). A hit only sets a
/// mark, so readers share the lock. Thread safe; two threads that miss on one key may both compute
/// the value, and then share the first result. `Hash` and `Equal` may be transparent, to look up
/// without making a Key.
template <class Key, class Value, class Hash = std::hash<Key>, class Equal = std::equal_to<Key>>
class BoundedCache {
 public:
  using ValuePtr = std::shared_ptr<const Value>;

  /// A cache of at most `capacity` entries; `capacity` must be at least 1.
  explicit BoundedCache(std::size_t capacity) : capacity_(capacity) {
    TESSERA_CHECK(capacity > 0, "a cache of capacity 0 was asked for; give it at least 1");
  }

  /// The cached value of `key`, or nullptr if there is none. Counts a hit or a miss.
  template <class LookUp>
  ValuePtr find(const LookUp& key) const {
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) {
      misses_.fetch_add(1, std::memory_order_relaxed);
      return nullptr;
    }
    hits_.fetch_add(1, std::memory_order_relaxed);
    found->second.used.store(true, std::memory_order_relaxed);
    return found->second.value;
  }

  /// Stores `value` for `key` unless the key already has a value; returns the cached value.
  ValuePtr insert(Key key, Value value) {
    auto made = std::make_shared<const Value>(std::move(value));
    const std::unique_lock lock(mutex_);
    const auto known = entries_.find(key);
    if (known != entries_.end()) {
      return known->second.value;
    }
    if (entries_.size() >= capacity_) {
      evict();
    }
    const auto entry = entries_.try_emplace(std::move(key), std::move(made)).first;
    order_.push_back(&*entry);
    return entry->second.value;
  }

  /// Returns the value of `key`. If the value is not cached, computes it by `compute(key)` and
  /// stores it. An exception of `compute` is passed on, and nothing is stored.
  template <class Compute>
  ValuePtr get(const Key& key, const Compute& compute) {
    if (auto found = find(key)) {
      return found;
    }
    return insert(key, compute(key));
  }

  void clear() {
    const std::unique_lock lock(mutex_);
    order_.clear();
    entries_.clear();
  }

  std::size_t capacity() const { return capacity_; }
  std::size_t size() const {
    const std::shared_lock lock(mutex_);
    return entries_.size();
  }
  std::int64_t hits() const { return hits_.load(std::memory_order_relaxed); }
  std::int64_t misses() const { return misses_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    explicit Entry(ValuePtr v) : value(std::move(v)) {}
    ValuePtr value;
    mutable std::atomic<bool> used{false};
  };
  using Entries = std::unordered_map<Key, Entry, Hash, Equal>;

  /// Removes the oldest entry that was not used since evict() last examined the entry.
  void evict() {
    while (order_.front()->second.used.exchange(false, std::memory_order_relaxed)) {
      order_.splice(order_.end(), order_, order_.begin());
    }
    entries_.erase(entries_.find(order_.front()->first));
    order_.pop_front();
  }

  const std::size_t capacity_;
  mutable std::shared_mutex mutex_;
  Entries entries_;
  // Keys of the cache, the oldest entry first.
  std::list<const typename Entries::value_type*> order_;
  mutable std::atomic<std::int64_t> hits_{0};
  mutable std::atomic<std::int64_t> misses_{0};
};

}  // namespace tessera::detail
TESSERA_API_END
