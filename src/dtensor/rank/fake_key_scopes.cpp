// The scopes that include the key of distributed tensors on a thread, so that operators on plain
// tensors come to the fallback too: operator modes and MetaDevice. Their guards are members of the
// public classes; what the fallback asks is here. Outside of such scopes plain calls never reach
// us, and cost nothing.

#include <utility>

#include "rank/rank_thread.h"
#include "tessera/dtensor/detail/meta_factory.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/internals/detail/dispatch_keys.h"

namespace tessera {

OperatorModeScope::OperatorModeScope(OperatorMode& mode)
    : scope_(&mode), guard_(detail::kDistributedKey) {}

// A pause hides the mode and leaves the key included: plain calls still come to the fallback,
// and pass through.
OperatorModePause::OperatorModePause() : scope_(nullptr) {}

OperatorMode* active_operator_mode() {
  // Checked at each dispatch. Scopes include the key, which is found in the thread's own memory;
  // the search goes over all that the thread carries.
  if (!detail::is_included(detail::kDistributedKey)) {
    return nullptr;
  }
  OperatorMode* const* mode =
      detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*>::active();
  return mode != nullptr ? *mode : nullptr;
}

namespace detail {

// The state is the thread's: modules are made where nobody runs a backward.
MetaFactoryGuard::MetaFactoryGuard()
    : outer_(std::exchange(RankThread::here().makes_meta, true)), guard_(kDistributedKey) {}
MetaFactoryGuard::~MetaFactoryGuard() {
  RankThread::here().makes_meta = outer_;
}

bool makes_meta_tensors() {
  return RankThread::here().makes_meta;
}

}  // namespace detail

}  // namespace tessera
