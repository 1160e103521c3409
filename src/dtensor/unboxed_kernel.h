#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "below_autograd.h"
#include "call_cache.h"
#include "distributed_impl.h"
#include "fallback.h"
#include "leaf_gradient.h"
#include "list_writes.h"
#include "local_list.h"
#include "tessera/dtensor/operator_mode.h"

namespace tessera::detail {

/// The kernel of one operator with its arguments unboxed: on a hit in the call cache it goes from
/// the wrappers to the local tensors and back without a stack. Everything else is left to
/// dispatch(), with which it shares keys and plans. `Op` is a struct of at::_ops whose results are
/// tensors; one without results writes to its first list.
template <class Op, class Schema = typename Op::schema>
class UnboxedKernel;

template <class Op, class Result, class... Arguments>
class UnboxedKernel<Op, Result(Arguments...)> {
 public:
  static void implement(torch::Library& library) {
    const std::string overload = Op::overload_name;
    const std::string name = overload.empty() ? Op::name : std::string(Op::name) + "." + overload;
    library.impl(name.c_str(), torch::CppFunction::makeFromUnboxedFunction(&call));
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<Result, at::Tensor&>;
  static constexpr bool kNothing = std::is_void_v<Result>;

  template <class T>
  static constexpr bool kIsList =
      std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>;

  static const c10::OperatorHandle& handle() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    return op;
  }

  static Result call(Arguments... arguments) {
    static const OperatorInfo& info = operator_info(handle());
    if (active_operator_mode() != nullptr) [[unlikely]]
      return call_boxed(arguments...);
    if (auto* plan = find_plan(info, arguments...); plan != nullptr && is_ready(*plan)) {
      if ((is_unremarkable(arguments) && ...)) return run(info, *plan, arguments...);
    }
    return call_boxed(arguments...);
  }

  static CallPlan* find_plan(const OperatorInfo& info, const Arguments&... arguments) {
    auto& cache = CallCache::of_thread();
    auto& key = cache.key();
    key.begin(info);
    std::size_t i = 0;
    (add(key, info.arguments[i++], arguments), ...);
    return cache.find(key, key.hash());
  }

  /// Nothing to do but the wrapping, and known how.
  static bool is_ready(const CallPlan& plan) {
    if (!plan.direct) return false;
    if constexpr (kInPlace || kNothing) return true;
    return std::all_of(plan.outputs.begin(), plan.outputs.end(),
                       [](const auto& output) { return output.spec != nullptr; });
  }

  /// A distributed tensor to which nothing special happens, or any other argument.
  template <class T>
  static bool is_unremarkable(const T& argument) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      auto* impl = argument.defined() ? as_distributed(argument) : nullptr;
      if (impl == nullptr) return true;
      keep_gradient_layout(*impl, argument);
      return impl->detached_view() == nullptr;
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      return !argument || is_unremarkable(*argument);
    } else if constexpr (kIsList<T>) {
      return std::all_of(argument.begin(), argument.end(), is_unremarkable<at::Tensor>);
    } else {
      return true;
    }
  }

  static Result run(const OperatorInfo& info, const CallPlan& plan, Arguments... arguments) {
    std::size_t i = 0;
    const auto localized = [&](auto& argument) -> decltype(auto) {
      return local(plan, i++, argument);
    };
    // Braces fix the order of evaluation.
    std::tuple<decltype(localized(arguments))...> locals{localized(arguments)...};
    if constexpr (kNothing) {
      const DirectListWrites writes(std::get<0>(std::tie(arguments...)));
      run_local(locals);
      writes.count();
    } else if constexpr (kInPlace) {
      run_local(locals);
      return std::get<0>(std::tie(arguments...));
    } else {
      auto result = run_local(locals);
      std::size_t output = 0;
      wrap_outputs(result, [&](at::Tensor& tensor) {
        tensor = wrap_output(info, plan.outputs[output++], std::move(tensor), arguments...);
      });
      return result;
    }
  }

  /// Straight to the backend's kernel: what stands above it has been passed on the way here. But
  /// for lazy conjugation and the like, of which the dispatcher knows whom they concern.
  template <class Locals>
  static Result run_local(Locals& locals) {
    BelowAutograd guard;
    return std::apply(
        [](auto&&... values) -> Result {
          const auto keys =
              (c10::DispatchKeySet() | ... | keys_of(values)) & c10::after_ADInplaceOrView_keyset;
          return is_dense(keys) ? Op::redispatch(keys, values...) : Op::call(values...);
        },
        locals);
  }

  static bool is_dense(c10::DispatchKeySet keys) {
    const auto dense =
        c10::full_backend_mask | c10::DispatchKeySet(c10::DispatchKey::Dense).raw_repr();
    return (keys.raw_repr() & ~dense) == 0;
  }

  static c10::DispatchKeySet keys_of(const at::Tensor& tensor) { return tensor.key_set(); }
  static c10::DispatchKeySet keys_of(const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->key_set() : c10::DispatchKeySet();
  }
  static c10::DispatchKeySet keys_of(const LocalList& list) {
    c10::DispatchKeySet keys;
    for (const auto& tensor : list.tensors()) keys = keys | tensor.key_set();
    return keys;
  }
  template <class T>
  static c10::DispatchKeySet keys_of(const T&) {
    return {};
  }

  template <class Wrap>
  static void wrap_outputs(at::Tensor& result, const Wrap& wrap) {
    wrap(result);
  }
  template <class Wrap>
  static void wrap_outputs(std::vector<at::Tensor>& results, const Wrap& wrap) {
    for (auto& result : results) wrap(result);
  }
  template <class Wrap, class... Tensors>
  static void wrap_outputs(std::tuple<Tensors...>& results, const Wrap& wrap) {
    std::apply([&](auto&... each) { (wrap(each), ...); }, results);
  }

  static at::Tensor wrap_output(const OperatorInfo& info, const CallPlan::Output& output,
                                at::Tensor result, const Arguments&... arguments) {
    const auto& spec = output.spec;
    if (!result.defined()) return result;
    if (info.viewed >= 0) share_version(result, std::get<0>(std::tie(arguments...)));
    if (result.scalar_type() == spec->dtype) [[likely]]
      return wrap(std::move(result), spec);
    auto other = *spec;
    other.dtype = result.scalar_type();
    return wrap(std::move(result), intern_spec(std::move(other)));
  }

  template <class Base>
  static void share_version(const at::Tensor& view, const Base& base) {
    if constexpr (std::is_same_v<Base, at::Tensor>) {
      const auto* impl = as_distributed(base);
      if (impl == nullptr || view.is_inference() || impl->local().is_inference()) return;
      view.unsafeGetTensorImpl()->set_version_counter(
          impl->local().unsafeGetTensorImpl()->version_counter());
    }
  }

  static Result call_boxed(Arguments... arguments) {
    torch::jit::Stack stack;
    (push(stack, arguments), ...);
    dispatch(handle(), stack);
    if constexpr (kInPlace) {
      return std::get<0>(std::tie(arguments...));
    } else if constexpr (!kNothing) {
      return c10::impl::PopResult<Result>::call(stack);
    }
  }

  template <class T>
  static void push(torch::jit::Stack& stack, const T& argument) {
    torch::jit::push_one(stack, argument);
  }
  static void push(torch::jit::Stack& stack, const at::ITensorListRef& list) {
    stack.emplace_back(c10::List<at::Tensor>(std::vector<at::Tensor>(list.begin(), list.end())));
  }

  // What the operator gets on the local tensors.

  template <class List>
  requires kIsList<List>
  static LocalList local(const CallPlan&, std::size_t, const List& argument) {
    LocalList list(argument.size());
    for (const auto& tensor : argument) list.add(local_or_self(tensor));
    return list;
  }

  template <class T>
  requires(!kIsList<T>) static const T& local(const CallPlan&, std::size_t, const T& argument) {
    return argument;
  }
  static at::Tensor& local(const CallPlan&, std::size_t, at::Tensor& argument) {
    return const_cast<at::Tensor&>(local_or_self(argument));
  }
  static const at::Tensor& local(const CallPlan&, std::size_t, const at::Tensor& argument) {
    return local_or_self(argument);
  }
  static std::optional<at::Tensor> local(const CallPlan&, std::size_t,
                                         const std::optional<at::Tensor>& argument) {
    return argument ? std::optional(local_or_self(*argument)) : std::nullopt;
  }
  static c10::SymIntArrayRef local(const CallPlan& plan, std::size_t i,
                                   const c10::SymIntArrayRef& argument) {
    for (const auto& rewritten : plan.rewritten) {
      if (static_cast<std::size_t>(rewritten.argument) == i) {
        return c10::fromIntArrayRefUnchecked(*rewritten.sizes);
      }
    }
    return argument;
  }
  static const at::Tensor& local_or_self(const at::Tensor& argument) {
    const auto* impl = argument.defined() ? as_distributed(argument) : nullptr;
    return impl != nullptr ? impl->local() : argument;
  }

  // The words of a call's key, as CallKey::build makes them of boxed arguments.

  using Kind = OperatorInfo::ArgumentKind;
  using Number = CallKey::Number;

  static void add(CallKey& key, Kind, const at::Tensor& tensor) { key.add_tensor(tensor); }
  template <class List>
  requires kIsList<List>
  static void add(CallKey& key, Kind, const List& tensors) {
    key.add_list(tensors.size());
    for (const auto& tensor : tensors) key.add_tensor(tensor);
  }
  static void add(CallKey& key, Kind kind, std::int64_t value) {
    kind == Kind::kScalar ? key.add_type_of(CallKey::number_of(value)) : key.add_integer(value);
  }
  static void add(CallKey& key, Kind kind, const c10::SymInt& value) {
    add(key, kind, value.guard_int(__FILE__, __LINE__));
  }
  static void add(CallKey& key, Kind kind, bool value) {
    kind == Kind::kScalar ? key.add_type_of(CallKey::number_of(value)) : key.add_bool(value);
  }
  static void add(CallKey& key, Kind kind, double value) {
    kind == Kind::kScalar ? key.add_type_of(CallKey::number_of(value)) : key.add_double(value);
  }
  static void add(CallKey& key, Kind kind, const at::Scalar& value) {
    if (value.isBoolean()) return add(key, kind, value.toBool());
    if (value.isIntegral(false)) return add(key, kind, value.toLong());
    if (value.isFloatingPoint()) return add(key, kind, value.toDouble());
    key.add_type_of(CallKey::number_of(value.toComplexDouble()));
  }
  static void add(CallKey& key, Kind kind, c10::ScalarType value) {
    add(key, kind, static_cast<std::int64_t>(value));
  }
  static void add(CallKey& key, Kind kind, c10::MemoryFormat value) {
    add(key, kind, static_cast<std::int64_t>(value));
  }
  static void add(CallKey& key, Kind, c10::IntArrayRef values) { key.add_integers(values); }
  static void add(CallKey& key, Kind, c10::SymIntArrayRef values) {
    key.add_integers(C10_AS_INTARRAYREF_SLOW(values));
  }
  static void add(CallKey& key, Kind kind, const c10::OptionalArrayRef<std::int64_t>& values) {
    values ? add(key, kind, *values) : key.add_none();
  }
  template <class T>
  static void add(CallKey& key, Kind kind, const std::optional<T>& value) {
    if (value) {
      add(key, kind, *value);
    } else {
      kind == Kind::kScalar ? key.add_type_of(Number::kNone) : key.add_none();
    }
  }
};

}  // namespace tessera::detail
