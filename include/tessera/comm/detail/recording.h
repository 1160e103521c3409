// Records a rank's collectives and the callers of the collectives.
#pragma once

#include <string_view>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A CallRecorder lists the collectives that a TrafficCounter counts, in the order in which the
/// collectives start. The list grows with each call, so record one step and not a training run.
/// Thread safe.
class CallRecorder : tessera::detail::NoCopy {
 public:
  explicit CallRecorder(TrafficCounter& counter);
  ~CallRecorder();

  std::vector<CollectiveCall> calls() const;

 private:
  TrafficCounter& counter_;
  std::vector<CollectiveCall> calls_;
};

/// While a CallerScope exists, the collectives that this thread starts are recorded with the caller
/// `name`, for example an operator. Scopes nest. `name` must outlive the scope.
class CallerScope : tessera::detail::NoCopy {
 public:
  explicit CallerScope(std::string_view name) : outer_(name_) {
    name_ = name;
    if (outer_.empty()) {
      outermost_ = name;
    }
  }
  ~CallerScope() {
    name_ = outer_;
    if (outer_.empty()) {
      outermost_ = {};
    }
  }

  /// Returns the name of this thread's innermost CallerScope; "" if there is none.
  static std::string_view current() { return name_; }
  /// Returns the name of this thread's outermost CallerScope, the function that the program itself
  /// called; "" if there is none.
  static std::string_view outermost() { return outermost_; }

 private:
  static inline constinit thread_local std::string_view name_{};
  static inline constinit thread_local std::string_view outermost_{};
  std::string_view outer_;
};

}  // namespace tessera::comm
TESSERA_API_END
