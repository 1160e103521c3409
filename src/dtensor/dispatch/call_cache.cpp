// The parts of the dispatch cache that a cached call of an unboxed operator never runs: cache keys
// of boxed arguments and plain tensors, insertion, statistics. Code for cached calls is inline in
// the header.

#include "dispatch/call_cache.h"

#include <ATen/core/DimVector.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

void CallKey::build(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  begin(info);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    add_boxed(info.arguments[i], arguments[i]);
  }
}

/// Encodes a plain tensor as a first word with properties, then its sizes and strides. Bits of the
/// first word above the tag, from the low end: wrapped number (1 bit), meta (1 bit), type (8 bits
/// from bit 8), number of dimensions.
void CallKey::add_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return push(kNone);
  }
  const auto wrapped = static_cast<std::uint64_t>(is_wrapped_number(tensor));
  const auto meta = static_cast<std::uint64_t>(tensor.is_meta());
  const auto type = static_cast<std::uint64_t>(tensor.scalar_type());
  push(tagged(static_cast<std::uint64_t>(tensor.dim()) << 16 | type << 8 | meta << 1 | wrapped,
              kPlainTensor));
  // at::mul(x, 2.0) passes the number as a tensor. A call with an infinite number needs another
  // plan.
  if (wrapped != 0) {
    add_type(number_type(tensor));
  }
  for (const auto size : tensor.sizes()) {
    push(static_cast<std::uint64_t>(size));
  }
  // The key includes strides, because results inherit the memory order of the inputs. A sparse
  // tensor has no strides.
  if (tensor.layout() != c10::kStrided) {
    return;
  }
  for (const auto stride : tensor.strides()) {
    push(static_cast<std::uint64_t>(stride));
  }
}

void CallKey::add_boxed(Kind kind, const c10::IValue& value) {
  switch (kind) {
    case Kind::kTensor:
      value.isTensor() ? add(kind, value.toTensor()) : add_none(kind);
      break;
    case Kind::kTensorList:
    case Kind::kOptionalTensorList:
      value.isNone() ? add_none(kind) : add_boxed_list(Kind::kTensor, value);
      break;
    case Kind::kNumberList:
      value.isNone() ? add_none(kind) : add_boxed_list(Kind::kScalar, value);
      break;
    case Kind::kGenerator:  // a plan does not depend on which generator is passed
      add_type(value.isNone() ? NumberType::kNone : NumberType::kOther);
      break;
    case Kind::kScalar:
    case Kind::kDType:
    case Kind::kStatic:
      add_boxed_value(kind, value);
      break;
  }
}

/// Adds the number of elements, then each element as an argument of `kind`. Without the number,
/// {a}, {b, c} and {a, b}, {c} would have the same cache key.
void CallKey::add_boxed_list(Kind kind, const c10::IValue& value) {
  begin_list(value.toListRef().size());
  for (const c10::IValue& element : value.toListRef()) {
    add_boxed(kind, element);
  }
}

/// Must add the same words as the typed overloads of add(), because boxed and unboxed calls share
/// plans.
void CallKey::add_boxed_value(Kind kind, const c10::IValue& value) {
  if (value.isNone()) {
    add_none(kind);
  } else if (value.isInt()) {
    add(kind, value.toInt());
  } else if (value.isBool()) {
    add(kind, value.toBool());
  } else if (value.isDouble()) {
    add(kind, value.toDouble());
  } else if (value.isComplexDouble()) {
    add(kind, value.toComplexDouble());
  } else if (value.isString()) {
    add_text(value.toStringRef());
  } else if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    push(tagged(static_cast<std::uint64_t>(device.type()) << 16 |
                    static_cast<std::uint16_t>(device.index()),
                kValue));
  } else if (value.isIntList()) {
    // Unlike toIntVector(), does not allocate for the usual number of dimensions.
    add(kind, c10::IntArrayRef(value.toDimVector()));
  } else if (value.isList()) {
    add_boxed_list(kind, value);
  } else {
    // No sharding rule reads the value of an argument of another type, so the type is enough (see
    // bind_static).
    add_text(value.tagKind());
  }
}

/// Adds the number of words, then the bytes of the text as words, padded with zeros.
void CallKey::add_text(const std::string& text) {
  begin_list(text.size());
  for (std::size_t i = 0; i < text.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
    push(word);
  }
}

namespace {

/// The dispatch caches of the threads of each rank. A cache is listed while its thread exists.
struct CachesOfRanks {
  std::mutex mutex;
  std::unordered_multimap<const RankState*, const CallCache*> caches;
};

/// Never destroyed, because threads may end while the process ends.
CachesOfRanks& caches_of_ranks() {
  static auto& all = *new CachesOfRanks;
  return all;
}

/// Registers a thread's cache with its rank for the lifetime of the thread.
class CacheListing : NoCopy {
 public:
  explicit CacheListing(const CallCache& cache) : cache_(cache) {
    const std::lock_guard lock(caches_of_ranks().mutex);
    caches_of_ranks().caches.emplace(rank_.get(), &cache_);
  }
  ~CacheListing() {
    const std::lock_guard lock(caches_of_ranks().mutex);
    std::erase_if(caches_of_ranks().caches,
                  [this](const auto& listed) { return listed.second == &cache_; });
  }

 private:
  std::shared_ptr<RankState> rank_ = RankState::here();
  const CallCache& cache_;
};

DispatchCacheStatistics statistics_of(const RankState& rank) {
  const std::lock_guard lock(caches_of_ranks().mutex);
  DispatchCacheStatistics sum;
  const auto [first, last] = caches_of_ranks().caches.equal_range(&rank);
  for (auto listed = first; listed != last; ++listed) {
    const DispatchCacheStatistics one = listed->second->statistics();
    sum.plans += one.plans;
    sum.capacity += one.capacity;
    sum.hits += one.hits;
    sum.misses += one.misses;
  }
  return sum;
}

}  // namespace

// A thread that is ending has no dispatch cache any more.
void CallCache::make_here() {
  struct Listed {
    CallCache cache;
    const CacheListing listing{cache};
  };
  thread_local Listed own;
  here_ = &own.cache;
}

/// Counts the cached plans by a scan of all slots. For tests and diagnosis only.
DispatchCacheStatistics CallCache::statistics() const {
  const auto plans =
      std::ranges::count_if(slots_, [](const Slot& slot) { return slot.entry != nullptr; });
  return {static_cast<std::size_t>(plans), kSlots, uses_ - misses_, misses_};
}

void CallCache::clear() {
  slots_ = std::vector<Slot>(kSlots);
}

/// key_ still has the words of the call that was not found: plan_call, which runs between look-up
/// and insertion, only runs operators below our dispatch key, so no other call is encoded.
CallPlan& CallCache::insert(const Lookup& missed, CallPlan plan) {
  const std::uint64_t hash = missed.hash;
  // Uses the first empty slot, because look_up stops there. If no slot is empty, replaces the least
  // recently used slot.
  auto* place = &slot(hash, 0);
  for (std::size_t i = 0; i < kNeighbourhood; ++i) {
    auto& candidate = slot(hash, i);
    if (!candidate.entry) {
      place = &candidate;
      break;
    }
    if (candidate.last_use < place->last_use) {
      place = &candidate;
    }
  }
  ++misses_;
  const auto words = key_.words();
  *place = {hash, ++uses_,
            std::make_unique<Entry>(Entry{{words.begin(), words.end()}, std::move(plan)})};
  return place->entry->plan;
}

}  // namespace tessera::detail

namespace tessera {

DispatchCacheStatistics dispatch_cache_statistics() {
  // Creates the caller's cache if the thread has made no call yet.
  detail::CallCache::of_thread();
  return detail::statistics_of(*detail::RankState::here());
}

void clear_dispatch_cache() {
  detail::CallCache::of_thread().clear();
  detail::clear_plans();
}

}  // namespace tessera
