#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_BEGIN
namespace tessera {

/// An OperatorMode intercepts operators below autograd, before the operators' kernels run, on one
/// thread and in the backwards of that thread. Only operators that make new tensors from tensors
/// are intercepted. Not intercepted: operators that write to an argument, return a view, have no
/// tensor argument, or are composed of other operators. Like PyTorch's TorchDispatchMode.
class OperatorMode {
 public:
  /// The operator of an intercepted call.
  struct Operator {
    const std::string& name;    ///< the operator's name, for example "aten::sum.dim_IntList"
    bool draws_random = false;  ///< whether the operator draws random numbers
  };
  using Results = std::vector<c10::IValue>;

  virtual ~OperatorMode() = default;
  /// The library calls call() for each intercepted operator on plain and distributed tensors, and
  /// for each synchronous redistribution, with the operator name "tessera::redistribute". `run`
  /// runs the operator and returns its results. Instead of these results, call() can return other
  /// results, of the types that the operator's schema declares. Operators that `run` calls on local
  /// tensors are not intercepted. If the operator is collective, then either all ranks call `run`,
  /// or no rank does. Exceptions that `run` or call() throws reach the caller of the operator.
  virtual Results call(const Operator& op, const std::function<Results()>& run) = 0;
};

/// While an OperatorModeScope exists, operators of this thread and of its backwards are passed to
/// `mode`, which must outlive the scope. An inner scope replaces an outer scope; scopes end in
/// reverse order, on the thread that began them.
class OperatorModeScope {
 public:
  explicit OperatorModeScope(OperatorMode& mode);

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
  detail::IncludeKeys guard_;
};

}  // namespace tessera
TESSERA_API_END
