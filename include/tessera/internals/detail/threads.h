// The state that libtorch has for each thread.
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

// Values of a thread that a backward copies to the threads on which it runs. libtorch's
// ThreadLocalState copies libtorch's values and its debug info, to which any library may add; there
// is no public way to copy anything else.
//
// Up to 2.12 the kinds of debug info are an enum, whose values beyond libtorch's own are free; from
// 2.13 a kind is the address of its name.
//
// Canary: CarriedSlotCanary.

/// The values that a backward copies to its threads. Each is a kind of libtorch's debug info.
enum class Carried : std::uint8_t {
  kStrict,
  kOperatorMode,
  kRandomRegion,
  kPhaseRecorder,
  kMemoryScope,
};

/// The kind of debug info that libtorch uses for a value; equal in every call and every library of
/// the process.
c10::DebugInfoKind kind_of(Carried what);

/// A scope in which `value` is active on this thread, and on autograd's threads while they run a
/// backward that this thread has started. (With CUDA a backward runs on another thread.) An inner
/// scope replaces an outer scope. Scopes end in reverse order, on the thread that began them.
template <Carried kWhat, class T>
class CarriedScope {
 public:
  explicit CarriedScope(T value)
      : guard_(kind_of(kWhat), std::make_shared<Value>(std::move(value))) {}

  /// The active value, or nullptr if there is none. Valid while the scope of the value exists.
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

// libtorch's state of a thread: dispatch keys, gradient mode, debug info, callbacks. Used to
// continue a call on another thread, as libtorch's backward and at::parallel_for do. It has no
// public name in torch::autograd.
//
// Canary: StateOfThreadCanary.

/// A copy of the state of the thread that makes the object.
using StateOfThread = at::ThreadLocalState;
/// While an object of this type exists, this thread has the given state.
using StateOfThreadScope = at::ThreadLocalStateGuard;

// The state of autocast, without the dispatch key that enables it (dispatch_keys.h): the types by
// device, and whether casts of weights are cached. Only torch.autocast, in Python, is public.
//
// Canary: AutocastStateCanary.

/// Autocast on the two devices that the library computes on, the CPU and CUDA.
struct AutocastState {
  std::array<c10::ScalarType, 2> types;
  bool keeps_casts = true;
};

AutocastState autocast_state();
void set_autocast_state(const AutocastState& state);
/// Whether operators on tensors of this device type are cast on this thread.
bool autocasts(c10::DeviceType device);

}  // namespace tessera::detail
TESSERA_API_END
