#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "agreed_call.h"
#include "agreement.h"
#include "below_autograd.h"
#include "bound_call.h"
#include "call_cache.h"
#include "distributed_impl.h"
#include "drop_by_element.h"
#include "fallback.h"
#include "fresh_tensor.h"
#include "list_writes.h"
#include "operator_info.h"
#include "random_fill.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/meta_factory.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/dtensor/policy.h"

namespace tessera::detail {
namespace {

using Kind = OperatorInfo::ArgumentKind;

bool holds_distributed(const c10::IValue& value) {
  if (value.isTensor()) return tessera::is_distributed(value.toTensor());
  if (!value.isList()) return false;
  const auto list = value.toListRef();
  return std::any_of(list.begin(), list.end(), holds_distributed);
}

bool any_distributed(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto kind = info.arguments[i];
    const bool tensors =
        kind == Kind::kTensor || kind == Kind::kTensorList || kind == Kind::kOptionalTensorList;
    if (tensors && holds_distributed(arguments[i])) return true;
  }
  return false;
}

/// On this key without a distributed tensor: inside a MetaDevice scope.
void call_plain(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack) {
  if (makes_meta_tensors() && info.device >= 0 && !info.takes_tensors) {
    auto& device =
        stack[stack.size() - info.arguments.size() + static_cast<std::size_t>(info.device)];
    if (device.isNone()) device = c10::Device(c10::kMeta);
  }
  BelowFallback guard;
  op.callBoxed(stack);
}

std::string describe_inputs(const CallPlan& plan) {
  std::vector<std::string> parts;
  for (const auto& input : plan.inputs) {
    auto text = describe(*input.spec);
    if (input.plan) {
      text += " -> " + describe(*input.target, input.spec->sizes);
    }
    parts.push_back(std::move(text));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

/// item() and equal() ask for one value, so its reduction counts as written.
bool asks_for_value(const OperatorInfo& info, const CallPlan& plan) {
  return info.name == "aten::_local_scalar_dense" ||
         (info.name == "aten::equal" && plan.form != nullptr);
}

void warn_once(const OperatorInfo& info) {
  static std::mutex mutex;
  static auto& warned = *new std::set<std::string>;
  std::lock_guard lock(mutex);
  if (!warned.insert(info.name).second) return;
  TORCH_WARN(info.name,
             " has no sharding rule for these arguments: its inputs are gathered and "
             "the result is kept replicated (a StrictScope makes this an error)");
}

void check_policy(const OperatorInfo& info, const CallPlan& plan) {
  TESSERA_CHECK(!plan.mixes_plain || plain_tensors_are_replicated(), info.name,
                " mixes distributed tensors with plain ones (", describe_inputs(plan),
                "): distribute those first, or state in a ReplicationScope that they are equal on "
                "all ranks");
  if (!plan.moves || asks_for_value(info, plan)) return;
  if (!is_strict()) {
    if (!plan.has_rule) warn_once(info);
    return;
  }
  TESSERA_CHECK(plan.has_rule, info.name, " has no sharding rule for ", describe_inputs(plan),
                ", and the strict scope refuses to gather: redistribute to Replicate first");
  fail(info.name, " needs its inputs redistributed (", describe_inputs(plan),
       "), which the strict scope refuses: redistribute them explicitly first");
}

/// Operators written in terms of others: run that, each of its operators comes here again.
void decompose(const c10::OperatorHandle& op, const OperatorInfo& info,
               std::span<const c10::IValue> arguments, torch::jit::Stack& stack) {
  c10::DispatchKeySet keys;
  for (const auto& tensor : bind_call(info, arguments).tensors) keys = keys | tensor.key_set();
  op.redispatchBoxed(
      keys & (c10::after_ADInplaceOrView_keyset - c10::DispatchKeySet(c10::DispatchKey::Fake)),
      &stack);
}

/// Of the plain tensors that are taken for replicated. What `out` held before does not matter.
void compare_plain(const c10::OperatorHandle& op, const OperatorInfo& info, const CallPlan& plan,
                   std::span<const c10::IValue> arguments) {
  std::vector<c10::IValue> read(arguments.begin(), arguments.end());
  for (const int argument : info.written) {
    const auto index = static_cast<std::size_t>(argument);
    if (op.schema().arguments()[index].kwarg_only()) read[index] = {};
  }
  auto tensors = bind_call(info, read).tensors;
  std::erase_if(tensors, [](const at::Tensor& tensor) {
    return tessera::is_distributed(tensor) || tensor.layout() != c10::kStrided;
  });
  check_replicated(plan.replicated.mesh, info.name, tensors);
}

void run_operator(const c10::OperatorHandle& op, const OperatorInfo& info,
                  torch::jit::Stack& stack) {
  const std::span<const c10::IValue> arguments(
      stack.data() + (stack.size() - info.arguments.size()), info.arguments.size());
  if (info.draws_random && fill_by_element(info, arguments)) {
    return torch::jit::drop(stack, arguments.size() - 1);
  }
  if (info.draws_random && drop_by_element(info, stack)) return;
  thread_local CallKey key;
  key.build(info, arguments);
  const auto hash = key.hash();
  auto& cache = CallCache::of_thread();
  auto* plan = cache.find(key, hash);
  if (plan == nullptr) {
    if (!any_distributed(info, arguments)) return call_plain(op, info, stack);
    if (info.decomposes) return decompose(op, info, arguments, stack);
    plan = &cache.insert(key, hash, plan_call(op, info, arguments));
  }
  if (info.functional && plan->moves && write_to_fresh(info, stack)) return;
  check_policy(info, *plan);
  if (goes_by_position(info, *plan, arguments)) return run_by_position(op, info, stack);
  const comm::CallerScope caller(info.name);
  if (plan->compares_plain) [[unlikely]]
    compare_plain(op, info, *plan, arguments);
  if (may_fail_apart(info, *plan, arguments)) {
    if (!run_agreed(op, info, *plan, stack)) return run_operator(op, info, stack);
  } else {
    run_call(op, info, *plan, stack);
  }
  if (info.makes_zeros) note_fresh(stack.back().toTensor());
}

/// Memory for others to write: dropout's mask is an empty_like that bernoulli_ fills.
bool makes_no_values(const OperatorInfo& info) {
  return info.name == "aten::empty_like" || info.name == "aten::new_empty" ||
         info.name == "aten::new_empty_strided";
}

bool makes_new_tensors(const OperatorInfo& info) {
  return info.takes_tensors && info.written.empty() && info.viewed < 0 && !info.decomposes &&
         !makes_no_values(info);
}

void call_mode(OperatorMode& mode, const c10::OperatorHandle& op, const OperatorInfo& info,
               torch::jit::Stack& stack) {
  const auto below = static_cast<std::ptrdiff_t>(stack.size() - info.arguments.size());
  OperatorMode::Results results = mode.call({info.name, info.draws_random}, [&] {
    run_operator(op, info, stack);
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
  const auto& info = operator_info(op);
  OperatorMode* mode = active_operator_mode();
  if (mode != nullptr && makes_new_tensors(info)) [[unlikely]] {
    call_mode(*mode, op, info, stack);
  } else {
    run_operator(op, info, stack);
  }
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace tessera::detail
