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

/// Intercepts operators between autograd and their kernels, on one thread and in its backwards,
/// which with CUDA run on another thread. It is called for operators that make new tensors from
/// tensors. It is not called for operators that write to an argument, return views, have no tensor
/// argument or are composed of other operators. PyTorch's TorchDispatchMode.
class OperatorMode {
 public:
  /// The operator of a call.
  struct Operator {
    const std::string& name;  ///< the operator's name, for example "aten::mm",
                              ///< "aten::sum.dim_IntList"
    bool draws_random = false;
  };
  using Results = std::vector<c10::IValue>;

  virtual ~OperatorMode() = default;
  /// Called for each intercepted operator on plain and distributed tensors, and for
  /// "tessera::redistribute" unless it is asynchronous. `run` runs the operator; call() may return
  /// other results of the same kinds instead. Operators that `run` calls on local tensors are not
  /// intercepted. `run` is collective if the operator is: all ranks must call it, or none. An
  /// exception from `run` or from call() is an exception of the operator.
  virtual Results call(const Operator& op, const std::function<Results()>& run) = 0;
};

/// During this scope, operators of this thread and of its backwards are passed to `mode`, which
/// must outlive the scope. An inner scope replaces an outer one; scopes end in reverse order, on
/// the thread that began them.
class OperatorModeScope {
 public:
  explicit OperatorModeScope(OperatorMode& mode);

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
  detail::IncludeKeys guard_;
};

/// During this scope, operators of this thread are not intercepted. For a library's internal work
/// that is not part of the user's computation.
class OperatorModePause {
 public:
  OperatorModePause();

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
};

/// This thread's active operator mode, or nullptr.
OperatorMode* active_operator_mode();

}  // namespace tessera
TESSERA_API_END
