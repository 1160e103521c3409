// Runs an operator call that reached kDistributedKey: builds the cache key, finds or makes the call
// plan, and runs the call as the kind of the call plan requires.

#include <ATen/core/DimVector.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "dispatch/call_cache.h"
#include "execute/run_local.h"
#include "operators/operator_info.h"
#include "plan/call_plan.h"
#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

void run_form(PlannedCall& call) {
  // As in localize_arguments, a leaf needs the hook on its gradient, and a view whose base was
  // written later is an error.
  for (const at::Tensor& tensor : bind_call(call.info, call.arguments()).tensors) {
    if (DistributedTensorImpl* impl = as_distributed(tensor)) {
      keep_gradient_layout(*impl, tensor);
      check_readable(*impl, call.info.name);
    }
  }
  // The lowering (alternative implementation of the operator) calls operators on distributed
  // tensors, so kDistributedKey stays enabled while the lowering runs.
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<c10::IValue> results = call.plan.lowering->run(call.arguments());
  call.stack.resize(call.first);
  std::ranges::move(results, std::back_inserter(call.stack));
}

/// Runs a call without distributed tensors under a MetaDevice or OperatorMode. With a MetaDevice,
/// factory functions make meta tensors, unless the call passes a device or a tensor (zeros_like).
void run_plain(PlannedCall& call) {
  const OperatorInfo& info = call.info;
  if (makes_meta_tensors() && info.device >= 0 && !info.takes_tensors) {
    c10::IValue& device = call.argument(info.device);
    if (device.isNone()) {
      device = c10::Device(c10::kMeta);
    }
  }
  const BelowFallback guard;
  call.op.callBoxed(call.stack);
}

/// Runs libtorch's composite kernel, whose operators reach kDistributedKey one by one. Excludes
/// kDistributedKey and the keys up to ADInplaceOrView, because otherwise the call would reach this
/// function again.
void run_decomposed(PlannedCall& call) {
  // The CPU kernel of a _foreach_ operator loops over lists of tensors and works for all devices.
  if (call.info.traits.has(Trait::kForeach)) {
    return call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call.stack);
  }
  c10::DispatchKeySet keys;
  for (const at::Tensor& tensor : bind_call(call.info, call.arguments()).tensors) {
    keys = keys | tensor.key_set();
  }
  const c10::DispatchKeySet below =
      c10::after_ADInplaceOrView_keyset - c10::DispatchKeySet(kDistributedKey);
  call.op.redispatchBoxed(keys & below, &call.stack);
}

/// Runs a call if the StrictScope and ReplicationScope of this thread permit the call; otherwise
/// throws Error before data is moved. Collectives are recorded with the operator's name.
template <class Run>
void run_allowed(PlannedCall& call, const Run& run) {
  check_policy(call);
  check_rows_together(call);
  const comm::CallerScope caller(call.info.name);
  if (call.plan.moves) {
    ++RankState::here()->implicit_redistributions;
  }
  run(call);
}

void dispatch_below_mode(const c10::OperatorHandle& op, const OperatorInfo& info,
                         torch::jit::Stack& stack) {
  const auto arguments = std::span<const c10::IValue>(stack).last(info.arguments.size());
  CallCache& cache = CallCache::of_thread();
  cache.key().build(info, arguments);
  dispatch(op, info, stack, cache.look_up());
}

void execute(PlannedCall& call, CallKind kind) {
  switch (kind) {
    case CallKind::kPlain:
      return run_plain(call);
    case CallKind::kDecomposed:
      return run_decomposed(call);
    case CallKind::kDirect:
    case CallKind::kLocal:
    case CallKind::kFailTogether:
      return run_allowed(call, [kind](PlannedCall& allowed) { run_local(allowed, kind); });
    case CallKind::kLowering:
      return run_allowed(call, run_form);
    case CallKind::kRandomInplace:
      return run_allowed(call, run_random_inplace);
    case CallKind::kNativeDropout:
      return run_allowed(call, run_native_dropout);
  }
}

/// Whether an OperatorMode intercepts the call. Views and operators that write to an argument are
/// not intercepted, because a mode can return saved results in place of a call.
bool is_seen_by_modes(const OperatorInfo& info) {
  return info.takes_tensors && info.written.empty() && info.viewed < 0 && !info.decomposes &&
         !info.traits.has(Trait::kLeavesMemory);
}

void call_mode(OperatorMode& mode, const c10::OperatorHandle& op, const OperatorInfo& info,
               torch::jit::Stack& stack) {
  const auto below = static_cast<std::ptrdiff_t>(stack.size() - info.arguments.size());
  // If an OperatorMode does not run the operator, the stack still has the arguments; otherwise the
  // stack has empty values. In both cases, the mode's results replace these entries.
  OperatorMode::Results results = mode.call({info.name, info.draws_random}, [&] {
    dispatch_below_mode(op, info, stack);
    return OperatorMode::Results(std::make_move_iterator(stack.begin() + below),
                                 std::make_move_iterator(stack.end()));
  });
  stack.erase(stack.begin() + below, stack.end());
  std::move(results.begin(), results.end(), std::back_inserter(stack));
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  dispatch(op, *stack);
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OperatorInfo& info = operator_info(op);
  OperatorMode* mode = active_operator_mode();
  if (mode != nullptr && is_seen_by_modes(info)) [[unlikely]] {
    call_mode(*mode, op, info, stack);
  } else {
    dispatch_below_mode(op, info, stack);
  }
}

void dispatch(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack,
              CallCache::Lookup lookup) {
  // Operators inside the call can remove lookup.plan from the cache: do not read `lookup.plan`
  // later.
  if (lookup.plan != nullptr) {
    PlannedCall call(op, info, *lookup.plan, stack);
    return execute(call, call.plan.kind);
  }
  const auto arguments = std::span<const c10::IValue>(stack).last(info.arguments.size());
  CallPlan made = plan_call(op, info, arguments);
  // Call plans of kinds kPlain and kDecomposed are cheap to make and are not cached.
  const bool keeps = made.kind != CallKind::kPlain && made.kind != CallKind::kDecomposed;
  PlannedCall call(op, info, keeps ? CallCache::of_thread().insert(lookup, std::move(made)) : made,
                   stack);
  execute(call, call.plan.kind);
}

// The fallback kernel on kDistributedKey for the operators of all libraries. Kernels that are
// registered for single operators (UnboxedKernel, and those in overrides/) take precedence.
TORCH_LIBRARY_IMPL(_, TESSERA_DISTRIBUTED_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void CallKey::build(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  begin(info);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    add_boxed(info.arguments[i], arguments[i]);
  }
}

/// Adds a plain tensor to the cache key: one word, then sizes and strides. The word has a tag,
/// wrapped number (1 bit), meta (1 bit), dtype (8 bits from bit 8), number of dimensions.
void CallKey::add_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return push(kNone);
  }
  const auto wrapped = static_cast<std::uint64_t>(is_wrapped_number(tensor));
  const auto meta = static_cast<std::uint64_t>(tensor.is_meta());
  const auto type = static_cast<std::uint64_t>(tensor.scalar_type());
  push(tagged(static_cast<std::uint64_t>(tensor.dim()) << 16 | type << 8 | meta << 1 | wrapped,
              kPlainTensor));
  // at::mul(x, 2.0) passes the number 2.0 as a tensor. An infinite number needs another call plan,
  // so the key tells whether the number is finite.
  if (wrapped != 0) {
    add_type(number_type(tensor));
  }
  for (const auto size : tensor.sizes()) {
    push(static_cast<std::uint64_t>(size));
  }
  // The cache key includes a plain tensor's strides, because results have the memory order of the
  // inputs. Sparse tensors have no strides.
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
    case Kind::kGenerator:  // the cache key contains only whether a generator is passed
      add_type(value.isNone() ? NumberType::kNone : NumberType::kOther);
      break;
    case Kind::kScalar:
    case Kind::kDType:
    case Kind::kStatic:
      add_boxed_value(kind, value);
      break;
  }
}

/// Adds a list to the cache key: its length, then each element. Without the length, the lists {a},
/// {b, c} and the lists {a, b}, {c} would have the same key.
void CallKey::add_boxed_list(Kind kind, const c10::IValue& value) {
  begin_list(value.toListRef().size());
  for (const c10::IValue& element : value.toListRef()) {
    add_boxed(kind, element);
  }
}

/// Adds a boxed value to the cache key. Must add the same words as add() for unboxed values,
/// because boxed and unboxed calls share cached plans.
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
    // toDimVector(), unlike toIntVector(), does not allocate for the usual number of dimensions.
    add(kind, c10::IntArrayRef(value.toDimVector()));
  } else if (value.isList()) {
    add_boxed_list(kind, value);
  } else {
    // No sharding rule reads values of the remaining argument types, so the cache key gets only the
    // type (see bind_static).
    add_text(value.tagKind());
  }
}

/// Adds a string to the cache key: how many 64-bit words follow, then the bytes, padded with zeros.
void CallKey::add_text(const std::string& text) {
  begin_list(text.size());
  for (std::size_t i = 0; i < text.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
    push(word);
  }
}

namespace {

/// The dispatch caches of all running threads, by rank.
struct CachesOfRanks {
  std::mutex mutex;
  std::unordered_multimap<const RankState*, const CallCache*> caches;
};

/// The registry is never destroyed, because threads can end while the process ends.
CachesOfRanks& caches_of_ranks() {
  static auto& all = *new CachesOfRanks;
  return all;
}

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

void CallCache::make_here() {
  struct Listed {
    CallCache cache;
    const CacheListing listing{cache};
  };
  thread_local Listed own;
  here_ = &own.cache;
}

DispatchCacheStatistics CallCache::statistics() const {
  const auto plans =
      std::ranges::count_if(slots_, [](const Slot& slot) { return slot.entry != nullptr; });
  return {static_cast<std::size_t>(plans), kSlots, uses_ - misses_, misses_};
}

void CallCache::clear() {
  slots_ = std::vector<Slot>(kSlots);
}

/// The key of look_up() is still valid here: since look_up(), plan_call has run operators only
/// below kDistributedKey, which do not change key_.
CallPlan& CallCache::insert(const Lookup& missed, CallPlan plan) {
  const std::uint64_t hash = missed.hash;
  // Uses the first empty entry of the hash table, because look_up stops there. If no entry is
  // empty, replaces the least recently used entry.
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

DispatchCacheStatistics dispatch_cache_statistics() {
  CallCache::of_thread();
  return statistics_of(*RankState::here());
}

}  // namespace tessera::detail

namespace tessera {

void clear_dispatch_cache() {
  detail::CallCache::of_thread().clear();
  detail::clear_plans();
}

}  // namespace tessera
