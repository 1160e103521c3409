// Thread-local state of libtorch.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// Thread-local values of Tessera that autograd copies to the threads of a backward. The values are
// part of libtorch's debug info, the only part of ThreadLocalState that a library can extend.
//
// Up to libtorch 2.12, DebugInfoKind is an enum, in which Tessera uses free values. From 2.13, a
// DebugInfoKind is the address of a name.
//
// Canary: CarriedSlotCanary, a test of libtorch itself.

/// Thread-local values that a backward copies to its threads. Each has its own DebugInfoKind.
enum class Carried : std::uint8_t {
  kStrict,
  kOperatorMode,
  kRandomRegion,
  kMemoryScope,
};

/// Returns the DebugInfoKind under which libtorch stores a Carried value. All shared libraries of
/// the process get the same DebugInfoKind for the same Carried value.
c10::DebugInfoKind kind_of(Carried what);

/// While a CarriedScope exists, `value` is active on this thread, and on other threads during a
/// backward of this thread. Scopes must end in reverse order, on the thread that began them.
template <Carried kWhat, class T>
class CarriedScope {
 public:
  explicit CarriedScope(T value)
      : guard_(kind_of(kWhat), std::make_shared<Value>(std::move(value))) {}

  /// Returns the active value, or nullptr. The pointer is valid while the value's CarriedScope
  /// exists.
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

// libtorch's thread-local state, with which another thread can continue a call: dispatch keys,
// gradient mode, debug info, callbacks. The type has no public name in torch::autograd.
//
// Canary: StateOfThreadCanary, a test of libtorch itself.

/// A copy of libtorch's thread-local state of the thread that makes the object.
using StateOfThread = at::ThreadLocalState;
using StateOfThreadScope = at::ThreadLocalStateGuard;

// The thread's autocast state: the dtype for each device type, and whether casts of weights are
// cached. The dispatch key that enables autocast is not included. Only Python's torch.autocast is
// public.
//
// Canary: AutocastStateCanary, a test of libtorch itself.

/// The settings of autocast for the CPU and for CUDA.
struct AutocastState {
  std::array<c10::ScalarType, 2> types;
  bool keeps_casts = true;
};

AutocastState autocast_state();
void set_autocast_state(const AutocastState& state);
/// Whether autocast is enabled on this thread for the given type of device.
bool autocasts(c10::DeviceType device);

}  // namespace tessera::detail
TESSERA_API_END
