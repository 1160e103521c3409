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

/// An OperatorMode intercepts operators below autograd, on one thread and in the backwards of that
/// thread. Operators that write to an argument, views, factories and composite operators are not
/// intercepted. Like PyTorch's TorchDispatchMode.
class OperatorMode {
 public:
  /// The operator of an intercepted call.
  struct Operator {
    const std::string& name;    ///< the operator's name, for example "aten::sum.dim_IntList"
    bool draws_random = false;  ///< whether the operator draws random numbers
  };
  using Results = std::vector<c10::IValue>;

  virtual ~OperatorMode() = default;
  /// Called for each intercepted operator on plain or distributed tensors. A synchronous
  /// redistribution has the name "tessera::redistribute". `run` runs the operator and returns the
  /// results. call() may return other results of the same types. For a collective operator, all
  /// ranks or no ranks call `run`. Exceptions reach the caller of the operator.
  virtual Results call(const Operator& op, const std::function<Results()>& run) = 0;
};

/// While an OperatorModeScope exists, operators of this thread and of its backwards are passed to
/// `mode`. `mode` must outlive the scope. An inner scope replaces an outer scope. Scopes end in
/// reverse order on the same thread.
class OperatorModeScope {
 public:
  explicit OperatorModeScope(OperatorMode& mode);

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
  detail::IncludeKeys guard_;
};

}  // namespace tessera
TESSERA_API_END
