// Dispatch keys that Tessera uses for its own purposes, and scopes that include or exclude dispatch
// keys on a thread.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tessera/export.h"

// The names of Tessera's dispatch keys as macros, for TORCH_LIBRARY_IMPL.
#define TESSERA_DISTRIBUTED_KEY Fake
#define TESSERA_RANDOM_KEY DeferredInit
#define TESSERA_FAKE_MODE_KEY CustomRNGKeyId
#define TESSERA_PLACEHOLDER_KEY TESTING_ONLY_GenericWrapper

TESSERA_API_BEGIN
namespace tessera::detail {

// libtorch's dispatch keys that Tessera uses for its own purposes. Programs cannot add keys. The
// public extension key PrivateUse1 has too low a priority.
//
// Fake, the key of distributed tensors, is below autograd and above the backends. Python's keys are
// above Fake up to libtorch 2.14, and below from 2.15. libtorch itself uses Fake only in Python.
//
// Canary: LentKeysCanary, a test of libtorch itself.

/// The dispatch key of distributed tensors. The key is below autograd, which sees one ordinary
/// tensor, and above the backends.
inline constexpr auto kDistributedKey = c10::DispatchKey::TESSERA_DISTRIBUTED_KEY;

/// The dispatch key of random operators in a RandomRegion. The key is above autograd, so that
/// results have a grad_fn. Other operators have no kernel for the key.
inline constexpr auto kRandomKey = c10::DispatchKey::TESSERA_RANDOM_KEY;

/// The dispatch key of a FakeMode. The key is below the key of distributed tensors, so that the
/// mode sees local tensors.
inline constexpr auto kFakeModeKey = c10::DispatchKey::TESSERA_FAKE_MODE_KEY;

/// The dispatch key of PlaceholderTensor, whose tensors have no other key and cannot be read.
inline constexpr auto kPlaceholderKey = c10::DispatchKey::TESSERA_PLACEHOLDER_KEY;

// Guards that change a thread's included and excluded dispatch keys. libtorch's public guards, such
// as NoGradGuard, set only certain keys. The functions are inline, because every dispatch of a
// distributed tensor uses them.
//
// Canary: KeyScopesCanary, a test of libtorch itself.

/// While an IncludeKeys object exists, operators on this thread are dispatched to the given keys
/// even if their tensors lack them.
using IncludeKeys = c10::impl::IncludeDispatchKeyGuard;
/// While an ExcludeKeys object exists, operators on this thread ignore the given dispatch keys of
/// their tensors.
using ExcludeKeys = c10::impl::ExcludeDispatchKeyGuard;

using KeysOfThread = c10::impl::LocalDispatchKeySet;
/// While a RestoreKeys object exists, this thread includes and excludes exactly the given dispatch
/// keys.
using RestoreKeys = c10::impl::ForceDispatchKeyGuard;

inline KeysOfThread keys_of_thread() {
  return c10::impl::tls_local_dispatch_key_set();
}

/// Whether this thread includes the dispatch key. Reads thread-local memory only once.
inline bool is_included(c10::DispatchKey key) {
  return c10::impl::tls_is_dispatch_key_included(key);
}

/// Whether this thread's operator calls skip autograd, as in the kernels of autograd itself.
inline bool is_below_autograd() {
  return c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

}  // namespace tessera::detail
TESSERA_API_END
