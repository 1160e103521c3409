#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace tessera::detail {

/// The values that CarriedScope carries. They are kinds of libtorch's debug info, the one list of
/// other libraries' values that a backward takes along; libtorch's own kinds count from 0.
enum class Carried : std::uint8_t {
  kStrict = 128,
  kOperatorMode,
  kRandomRegion,
  kPhaseRecorder,
  kMemoryScope,
  kModuleWatch,
};

/// While it exists, `value` is in force on this thread, and on autograd's threads while they run a
/// backward that this thread calls: with CUDA that is another thread than the one that calls. Inner
/// scopes replace outer ones; scopes end in reverse order, on the thread that began them.
template <Carried kWhat, class T>
class CarriedScope {
 public:
  explicit CarriedScope(T value) : guard_(kKind, std::make_shared<Value>(std::move(value))) {}

  /// The value in force, or nullptr. Valid as long as its scope.
  static const T* active() {
    const c10::DebugInfoBase* found = c10::ThreadLocalDebugInfo::get(kKind);
    return found == nullptr ? nullptr : &static_cast<const Value*>(found)->value;
  }

 private:
  static constexpr auto kKind = static_cast<c10::DebugInfoKind>(kWhat);

  struct Value final : c10::DebugInfoBase {
    explicit Value(T given) : value(std::move(given)) {}
    T value;
  };

  c10::DebugInfoGuard guard_;
};

}  // namespace tessera::detail
