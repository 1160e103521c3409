// The cache of call plans, and dispatch(), which runs a call and caches its plan.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include <bit>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "operators/operator_info.h"
#include "plan/call_plan.h"
#include "tensor/distributed_impl.h"
#include "tessera/dtensor/detail/thread_modes.h"

namespace tessera::detail {

/// The cache key of an operator call: 64-bit words for everything that the call plan depends on.
/// Boxed and unboxed calls have the same key. Each thread reuses one CallKey to allocate nothing.
class CallKey {
 public:
  using Kind = OperatorInfo::ArgumentKind;

  void begin(const OperatorInfo& info) {
    words_.clear();
    push(reinterpret_cast<std::uintptr_t>(&info));
  }
  void build(const OperatorInfo& info, std::span<const c10::IValue> arguments);

  /// Adds a tensor to the cache key. A distributed tensor is one word: the address of its interned
  /// spec, with flags for meta tensors and detached views in the low bits.
  void add(Kind, const at::Tensor& tensor) {
    const auto* impl = tensor.defined() ? as_distributed(tensor) : nullptr;
    if (impl != nullptr) [[likely]] {
      push(reinterpret_cast<std::uintptr_t>(impl->spec().get()) |
           (impl->is_meta() ? kMeta : std::uint64_t{0}) |
           (impl->detached_view() != nullptr ? kDetached : std::uint64_t{0}));
    } else {
      add_plain(tensor);
    }
  }
  template <class List>
    requires std::same_as<List, at::TensorList> || std::same_as<List, at::ITensorListRef>
  void add(Kind kind, const List& tensors) {
    begin_list(tensors.size());
    for (const auto& tensor : tensors) {
      add(kind, tensor);
    }
  }
  // Adds a number to the cache key. For kScalar (a number that no sharding rule reads), adds only
  // the type: otherwise each new learning rate would need a new call plan.
  void add(Kind kind, std::int64_t value) {
    if (begin_number(kind, value, NumberType::kInteger)) {
      push(static_cast<std::uint64_t>(value));
    }
  }
  void add(Kind kind, bool value) {
    if (begin_number(kind, value, NumberType::kBool)) {
      push(static_cast<std::uint64_t>(value));
    }
  }
  void add(Kind kind, double value) {
    if (begin_number(kind, value, NumberType::kDouble)) {
      push(std::bit_cast<std::uint64_t>(value));
    }
  }
  void add(Kind, const c10::complex<double>& value) { add_type(number_type(value)); }
  void add(Kind kind, const c10::SymInt& value) { add(kind, value.guard_int(__FILE__, __LINE__)); }
  void add(Kind kind, const at::Scalar& value) {
    if (value.isBoolean()) {
      return add(kind, value.toBool());
    }
    if (value.isIntegral(false)) {
      return add(kind, value.toLong());
    }
    if (value.isFloatingPoint()) {
      return add(kind, value.toDouble());
    }
    add(kind, value.toComplexDouble());
  }
  void add(Kind kind, c10::ScalarType value) { add(kind, static_cast<std::int64_t>(value)); }
  void add(Kind kind, c10::MemoryFormat value) { add(kind, static_cast<std::int64_t>(value)); }
  void add(Kind, c10::IntArrayRef values) {
    begin_list(values.size());
    for (const auto value : values) {
      push(static_cast<std::uint64_t>(value));
    }
  }
  void add(Kind kind, c10::SymIntArrayRef values) { add(kind, C10_AS_INTARRAYREF_SLOW(values)); }
  void add(Kind kind, const c10::OptionalArrayRef<std::int64_t>& values) {
    values ? add(kind, *values) : add_none(kind);
  }
  template <class T>
  void add(Kind kind, const std::optional<T>& value) {
    value ? add(kind, *value) : add_none(kind);
  }

  std::span<const std::uint64_t> words() const { return {words_.data(), words_.size()}; }
  /// Hashes the words by Fibonacci hashing. The shift moves the high bits, which are mixed best, to
  /// the low bits, which select an entry of the hash table.
  std::uint64_t hash() const {
    std::uint64_t hash = words_.size();
    for (const auto word : words_) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 32;
    }
    return hash;
  }

 private:
  // The low bits of a word say what the word describes. The address of a spec, aligned to 8 bytes,
  // has three free bits; all other words have the lowest bit set.
  static constexpr std::uint64_t kMeta = 2;
  static constexpr std::uint64_t kDetached = 4;
  static constexpr std::uint64_t kNone = 1;
  static constexpr std::uint64_t kPlainTensor = 3;
  static constexpr std::uint64_t kList = 5;
  static constexpr std::uint64_t kValue = 7;
  static constexpr std::uint64_t tagged(std::uint64_t value, std::uint64_t tag) {
    return value << 3 | tag;
  }

  void push(std::uint64_t word) { words_.push_back(word); }
  void begin_list(std::size_t size) { push(tagged(size, kList)); }
  void add_type(NumberType type) { push(tagged(static_cast<std::uint64_t>(type), kValue)); }
  void add_none(Kind kind) { kind == Kind::kScalar ? add_type(NumberType::kNone) : push(kNone); }
  template <class T>
  bool begin_number(Kind kind, T value, NumberType type) {
    add_type(kind == Kind::kScalar ? number_type(value) : type);
    return kind != Kind::kScalar;
  }
  void add_plain(const at::Tensor& tensor);

  void add_boxed(Kind kind, const c10::IValue& value);
  void add_boxed_list(Kind kind, const c10::IValue& value);
  void add_boxed_value(Kind kind, const c10::IValue& value);
  void add_text(const std::string& text);

  c10::SmallVector<std::uint64_t, 32> words_;
};

/// A hash table with the plans of this thread's recent calls, so that ranks that are threads need
/// no locks. The size is bounded: new plans replace the least recently used plans.
class CallCache {
 public:
  static CallCache& of_thread() {
    if (here_ == nullptr) [[unlikely]] {
      make_here();
    }
    return *here_;
  }

  CallCache() = default;
  CallCache(const CallCache&) = delete;
  CallCache& operator=(const CallCache&) = delete;
  ~CallCache() { here_ = nullptr; }

  /// The cache key of the next look_up(). insert() stores a call plan with the same key, so no
  /// other operator may be dispatched in between.
  CallKey& key() { return key_; }

  struct Lookup {
    std::uint64_t hash = 0;
    CallPlan* plan = nullptr;  ///< the cached plan, or nullptr; valid until the next insert()
  };
  Lookup look_up() {
    const std::uint64_t hash = key_.hash();
    for (std::size_t i = 0; i < kNeighbourhood; ++i) {
      auto& candidate = slot(hash, i);
      if (!candidate.entry) {
        return {hash, nullptr};
      }
      if (candidate.hash == hash && candidate.entry->is_for(key_.words())) {
        candidate.last_use = ++uses_;
        return {hash, &candidate.entry->plan};
      }
    }
    return {hash, nullptr};
  }
  CallPlan& insert(const Lookup& missed, CallPlan plan);

  DispatchCacheStatistics statistics() const;
  void clear();

 private:
  // A plan is stored at the position of its key's hash or in one of the next positions. Plans are
  // replaced but never removed, so look_up() stops at the first empty position.
  static constexpr std::size_t kSlots = 8192;
  static constexpr std::size_t kNeighbourhood = 8;

  /// A cached call plan and its key. The key contains addresses of specs. The plan's inputs own
  /// these specs, so the addresses are not reused while the Entry exists.
  struct Entry {
    std::vector<std::uint64_t> words;
    CallPlan plan;

    bool is_for(std::span<const std::uint64_t> key) const {
      if (words.size() != key.size()) {
        return false;
      }
      std::uint64_t difference = 0;
      for (std::size_t i = 0; i < key.size(); ++i) {
        difference |= words[i] ^ key[i];
      }
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
  // This thread's cache. A pointer, because an object needs an initialisation check at each access.
  static inline constinit thread_local CallCache* here_ = nullptr;

  CallKey key_;
  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::uint64_t uses_ = 0;
  std::uint64_t misses_ = 0;
};

/// Runs an operator call that reached the dispatch key kDistributedKey. The results replace the
/// arguments on the stack. Collective if inputs must be redistributed.
void dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Like dispatch(), for a caller that has looked up the call plan. Ignores any OperatorMode.
void dispatch(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack,
              CallCache::Lookup lookup);

}  // namespace tessera::detail
