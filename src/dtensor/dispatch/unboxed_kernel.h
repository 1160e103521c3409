// Kernels on kDistributedKey that take unboxed arguments and do not use libtorch's stack.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
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

#include "autograd/autograd.h"
#include "dispatch/call_cache.h"
#include "execute/run_local.h"
#include "rank/rank.h"
#include "tensor/distributed_impl.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::detail {

/// A kernel with unboxed arguments for operator `Op` (of at::_ops, or a FusedOperator). Calls with
/// a cached plan of kind kDirect run without a stack; other calls are boxed and passed to
/// dispatch().
template <class Op, class Schema = typename Op::schema>
class UnboxedKernel;

template <class Op, class Result, class... Arguments>
class UnboxedKernel<Op, Result(Arguments...)> {
 public:
  static torch::CppFunction function() {
    return torch::CppFunction::makeFromUnboxedFunction(&call);
  }
  static void implement(torch::Library& library) {
    const std::string overload = Op::overload_name;
    const std::string name = overload.empty() ? Op::name : std::string(Op::name) + "." + overload;
    library.impl(name.c_str(), function());
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<Result, at::Tensor&>;

  template <class T>
  static constexpr bool kIsList =
      std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>;

  /// Looks up the operator at the first call and not before, because kernels are registered while
  /// libraries are loaded.
  static const c10::OperatorHandle& handle() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    return op;
  }

  /// The function that the dispatcher calls. Boxes the call and calls dispatch() if an OperatorMode
  /// is active, or if the cache has no call plan of kind kDirect.
  static Result call(Arguments... arguments) {
    static const OperatorInfo& info = operator_info(handle());
    if (active_operator_mode() != nullptr) [[unlikely]] {
      return call_boxed([](auto& stack) { dispatch(handle(), stack); }, arguments...);
    }
    const CallCache::Lookup found = look_up(info, arguments...);
    if (found.plan != nullptr && is_ready(*found.plan)) {
      (keep_gradient_layouts(arguments), ...);
      return run(info, *found.plan, arguments...);
    }
    return call_boxed([&](auto& stack) { dispatch(handle(), info, stack, found); }, arguments...);
  }

  /// Looks up the plan of the call. A fold over the comma operator evaluates from left to right, so
  /// the arguments are in the cache key in schema order.
  static CallCache::Lookup look_up(const OperatorInfo& info, const Arguments&... arguments) {
    CallCache& cache = CallCache::of_thread();
    CallKey& key = cache.key();
    key.begin(info);
    std::size_t i = 0;
    (key.add(info.arguments[i++], arguments), ...);
    return cache.look_up();
  }

  static bool is_ready(const CallPlan& plan) {
    if (plan.kind != CallKind::kDirect ||
        (plan.takes_plain && !plain_is_replicated_on(plan.replicated.mesh))) {
      return false;
    }
    if constexpr (kInPlace) {
      return true;
    }
    return std::all_of(plan.outputs.begin(), plan.outputs.end(),
                       [](const auto& output) { return output.spec != nullptr; });
  }

  /// Installs the hooks that redistribute the gradients of leaves among the tensors in `argument`.
  /// For boxed calls, localize_arguments does the same.
  template <class T>
  static void keep_gradient_layouts(const T& argument) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      auto* impl = argument.defined() ? as_distributed(argument) : nullptr;
      if (impl != nullptr) {
        keep_gradient_layout(*impl, argument);
      } else if (argument.defined() && argument.requires_grad()) {
        keep_gradient_plain(argument);
      }
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      if (argument) {
        keep_gradient_layouts(*argument);
      }
    } else if constexpr (kIsList<T>) {
      for (const at::Tensor& tensor : argument) {
        keep_gradient_layouts(tensor);
      }
    }
  }

  /// Unwraps the local tensors, runs the kernel and wraps the results. The kernel runs below
  /// kDistributedKey, so no nested call can remove `plan` from the cache.
  static Result run(const OperatorInfo& info, const CallPlan& plan, Arguments... arguments) {
    std::size_t i = 0;
    const auto localized = [&](auto& argument) -> decltype(auto) {
      return local(plan, i++, argument);
    };
    // Braces make the compiler evaluate the arguments from left to right.
    std::tuple<decltype(localized(arguments))...> locals{localized(arguments)...};
    if constexpr (kInPlace) {
      run_kernel(locals);
      return std::get<0>(std::tie(arguments...));
    } else {
      auto result = run_kernel(locals);
      std::size_t output = 0;
      wrap_outputs(result, [&](at::Tensor& tensor) {
        tensor = wrap_output(info, plan.outputs[output++], std::move(tensor), arguments...);
      });
      return result;
    }
  }

  /// Calls the backend's kernel directly. In a FakeMode, and for lazy conjugation or negation,
  /// dispatches instead: these features have keys between kDistributedKey and the backend's key.
  template <class Locals>
  static Result run_kernel(Locals& locals) {
    BelowAutograd guard;
    return std::apply(
        [](auto&&... values) -> Result {
          const auto keys =
              (c10::DispatchKeySet() | ... | keys_of(values)) & c10::after_ADInplaceOrView_keyset;
          return is_dense(keys) && !kernels::in_fake_mode() ? Op::redispatch(keys, values...)
                                                            : Op::call(values...);
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
  static c10::DispatchKeySet keys_of(const std::vector<at::Tensor>& list) {
    c10::DispatchKeySet keys;
    for (const auto& tensor : list) {
      keys = keys | tensor.key_set();
    }
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
    for (auto& result : results) {
      wrap(result);
    }
  }
  template <class Wrap, class... Tensors>
  static void wrap_outputs(std::tuple<Tensors...>& results, const Wrap& wrap) {
    std::apply([&](auto&... each) { (wrap(each), ...); }, results);
  }

  static at::Tensor wrap_output(const OperatorInfo& info, const CallPlan::Output& output,
                                at::Tensor result, const Arguments&... arguments) {
    const auto& spec = output.spec;
    if (!result.defined()) {
      return result;
    }
    if (info.viewed >= 0) {
      share_version(result, std::get<0>(std::tie(arguments...)));
    }
    if (result.scalar_type() == spec->dtype) [[likely]] {
      return wrap(std::move(result), spec);
    }
    // The dtype of some results depends on state that is not in the cache key, such as torch's
    // default dtype.
    auto other = *spec;
    other.dtype = result.scalar_type();
    return wrap(std::move(result), intern_spec(std::move(other)));
  }

  /// Makes `view` share the version counter of `base`, as the ADInplaceOrView key does in ordinary
  /// calls. Inference tensors have no version counter.
  template <class Base>
  static void share_version(const at::Tensor& view, const Base& base) {
    if constexpr (std::is_same_v<Base, at::Tensor>) {
      const auto* impl = as_distributed(base);
      if (impl == nullptr || view.is_inference() || impl->local().is_inference()) {
        return;
      }
      count_with(view, impl->local());
    }
  }

  /// Runs a call with boxed arguments, which is slow: allocates a stack, and increments the
  /// reference count of each tensor.
  template <class Dispatch>
  static Result call_boxed(const Dispatch& dispatch_stack, Arguments... arguments) {
    torch::jit::Stack stack;
    (push(stack, arguments), ...);
    dispatch_stack(stack);
    if constexpr (kInPlace) {
      return std::get<0>(std::tie(arguments...));
    } else {
      return take_result<Result>(stack);
    }
  }

  template <class T>
  static void push(torch::jit::Stack& stack, const T& argument) {
    torch::jit::push_one(stack, argument);
  }
  static void push(torch::jit::Stack& stack, const at::ITensorListRef& list) {
    stack.emplace_back(c10::List<at::Tensor>(std::vector<at::Tensor>(list.begin(), list.end())));
  }

  template <class List>
    requires kIsList<List>
  static std::vector<at::Tensor> local(const CallPlan&, std::size_t, const List& argument) {
    std::vector<at::Tensor> list;
    list.reserve(argument.size());
    for (const auto& tensor : argument) {
      list.push_back(local_or_self(tensor));
    }
    return list;
  }

  template <class T>
    requires(!kIsList<T>)
  static const T& local(const CallPlan&, std::size_t, const T& argument) {
    return argument;
  }
  // The local tensor of an argument that an in-place operator writes. Kernels of such operators
  // take at::Tensor&, but local_or_self() returns a const reference.
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
};

}  // namespace tessera::detail
