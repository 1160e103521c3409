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
/// which with CUDA run on another thread. It sees operators that make new tensors from tensors. It
/// does not see operators that write to an argument, return views, take no tensor or are composed
/// of others. PyTorch's TorchDispatchMode.
class OperatorMode {
 public:
  /// The operator of a call.
  struct Operator {
    const std::string& name;  ///< "aten::mm", "aten::sum.dim_IntList"
    bool draws_random = false;
  };
  using Results = std::vector<c10::IValue>;

  virtual ~OperatorMode() = default;
  /// Called for each such operator on plain and distributed tensors, and for
  /// "tessera::redistribute" unless it is asynchronous. `run` runs the operator; the function may
  /// return other results of the same kinds instead. Operators that `run` calls on local tensors
  /// are not seen. `run` is collective if the operator is: all ranks must call it, or none. An
  /// error of `run` or of this function is an error of the operator.
  virtual Results call(const Operator& op, const std::function<Results()>& run) = 0;
};

/// While it exists, operators of this thread and of its backwards go to `mode`, which must outlive
/// it. An inner scope replaces an outer one; scopes end in reverse order, on the thread that began
/// them.
class OperatorModeScope {
 public:
  explicit OperatorModeScope(OperatorMode& mode);

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
  detail::IncludeKeys guard_;
};

/// While it exists, operators of this thread go to no mode. For the work that a library does apart
/// from the user's computation.
class OperatorModePause {
 public:
  OperatorModePause();

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
};

/// The mode of this thread, or nullptr.
OperatorMode* active_operator_mode();

}  // namespace tessera
TESSERA_API_END
