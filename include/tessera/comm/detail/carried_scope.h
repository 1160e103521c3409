#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <utility>

#include "tessera/export.h"
#include "tessera/internals/detail/carried_slot.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// While it exists, `value` is in force on this thread, and on autograd's threads while they run a
/// backward that this thread calls: with CUDA that is another thread than the one that calls. Inner
/// scopes replace outer ones; scopes end in reverse order, on the thread that began them.
template <Carried kWhat, class T>
class CarriedScope {
 public:
  explicit CarriedScope(T value)
      : guard_(kind_of(kWhat), std::make_shared<Value>(std::move(value))) {}

  /// The value in force, or nullptr. Valid as long as its scope.
  static const T* active() {
    const c10::DebugInfoBase* found = c10::ThreadLocalDebugInfo::get(kind_of(kWhat));
    return found == nullptr ? nullptr : &static_cast<const Value*>(found)->value;
  }

 private:
  struct Value final : c10::DebugInfoBase {
    explicit Value(T given) : value(std::move(given)) {}
    T value;
  };

  c10::DebugInfoGuard guard_;
};

}  // namespace tessera::detail
TESSERA_API_END
