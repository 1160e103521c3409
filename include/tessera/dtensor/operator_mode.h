#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// What a thread may put between autograd and the operators. PyTorch's TorchDispatchMode, for
/// operators that make new tensors of tensors: those that write to an argument, return views, take
/// no tensor or are composed of others run as ever.
class OperatorMode {
 public:
  struct Operator {
    const std::string& name;  ///< "aten::mm", "aten::sum.dim_IntList"
    bool draws_random = false;
  };
  using Results = std::vector<c10::IValue>;

  virtual ~OperatorMode() = default;
  /// Called for each such operator, on plain and distributed tensors, and for
  /// "tessera::redistribute" (not asynchronous ones). `run` runs it; other results of the same
  /// kinds may be returned instead. What the operator itself runs on local tensors is not seen.
  virtual Results call(const Operator& op, const std::function<Results()>& run) = 0;
};

/// While it lives, on this thread: operators go to `mode`. Scopes replace one another.
class OperatorModeScope {
 public:
  explicit OperatorModeScope(OperatorMode& mode);
  ~OperatorModeScope();
  OperatorModeScope(const OperatorModeScope&) = delete;
  OperatorModeScope& operator=(const OperatorModeScope&) = delete;

 private:
  OperatorMode* outer_;
  c10::impl::IncludeDispatchKeyGuard guard_;
};

/// While it lives, on this thread: operators go to no mode. For work that a library does beside the
/// user's computation.
class OperatorModePause {
 public:
  OperatorModePause();
  ~OperatorModePause();
  OperatorModePause(const OperatorModePause&) = delete;
  OperatorModePause& operator=(const OperatorModePause&) = delete;

 private:
  OperatorMode* outer_;
};

/// The mode of this thread, or nullptr.
OperatorMode* active_operator_mode();

}  // namespace tessera
