// The dispatch keys that a thread includes and excludes, whatever tensors a call has. libtorch's
// own scopes (InferenceMode, NoGradGuard, AutoDispatchBelowADInplaceOrView) set certain keys only;
// those of any key are in c10::impl.
//
// Aliases and inline functions: every dispatch of a distributed tensor goes through them. No
// version differs.
//
// Canary: KeyScopesCanary.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// While one exists, operators on this thread go to a key that their tensors lack.
using IncludeKeys = c10::impl::IncludeDispatchKeyGuard;
/// While one exists, operators on this thread pass keys that their tensors have.
using ExcludeKeys = c10::impl::ExcludeDispatchKeyGuard;

/// What a thread includes and excludes.
using KeysOfThread = c10::impl::LocalDispatchKeySet;
/// While one exists, this thread has these keys instead.
using RestoreKeys = c10::impl::ForceDispatchKeyGuard;

inline KeysOfThread keys_of_thread() {
  return c10::impl::tls_local_dispatch_key_set();
}

/// One look at the thread's own memory.
inline bool is_included(c10::DispatchKey key) {
  return c10::impl::tls_is_dispatch_key_included(key);
}

/// Whether autograd does not see the calls of this thread, as within its own kernels.
inline bool is_below_autograd() {
  return c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

}  // namespace tessera::detail
TESSERA_API_END
