// Dispatch keys that the library uses for its own purposes, and scopes that include or exclude keys
// on a thread.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tessera/export.h"

// Names of dispatch keys in the form that TORCH_LIBRARY_IMPL takes.
#define TESSERA_DISTRIBUTED_KEY Fake
#define TESSERA_RANDOM_KEY DeferredInit
#define TESSERA_FAKE_MODE_KEY CustomRNGKeyId
#define TESSERA_PLACEHOLDER_KEY TESTING_ONLY_GenericWrapper

TESSERA_API_BEGIN
namespace tessera::detail {

// Dispatch keys that libtorch defines for other uses and that this library uses for its own. There
// is no public way to add a key to libtorch's enum. PrivateUse1, the public extension key, is the
// key of a device, below the others.
//
// The order of keys decides which key handles a call first. Up to 2.14 Fake is below Python's keys,
// from 2.15 above them; both are below autograd and above the backends. libtorch uses Fake for fake
// tensors, whose fallbacks exist only in Python.
//
// Canary: LentKeysCanary.

/// The key of distributed tensors: below autograd, which sees one ordinary tensor, and above the
/// backends.
inline constexpr auto kDistributedKey = c10::DispatchKey::TESSERA_DISTRIBUTED_KEY;

/// The key of random operators in a RandomRegion: above autograd, where a tensor still has its
/// history. Only random operators have kernels for it, so including the key costs other operators
/// nothing.
inline constexpr auto kRandomKey = c10::DispatchKey::TESSERA_RANDOM_KEY;

/// The key of a FakeMode: below the key of distributed tensors, so that the mode sees local
/// tensors.
inline constexpr auto kFakeModeKey = c10::DispatchKey::TESSERA_FAKE_MODE_KEY;

/// The key of placeholder tensors (PlaceholderTensor), which have no other key and cannot be read.
inline constexpr auto kPlaceholderKey = c10::DispatchKey::TESSERA_PLACEHOLDER_KEY;

// The dispatch keys that a thread includes and excludes for every call. libtorch's public scopes
// (InferenceMode, NoGradGuard, AutoDispatchBelowADInplaceOrView) set only certain keys. The scopes
// for any key are in c10::impl.
//
// Aliases and inline functions, because every dispatch of a distributed tensor uses them.
//
// Canary: KeyScopesCanary.

/// While an object of this type exists, operators on this thread are dispatched to a key that their
/// tensors lack.
using IncludeKeys = c10::impl::IncludeDispatchKeyGuard;
/// While an object of this type exists, operators on this thread skip a key that their tensors
/// have.
using ExcludeKeys = c10::impl::ExcludeDispatchKeyGuard;

/// The keys that a thread includes and excludes.
using KeysOfThread = c10::impl::LocalDispatchKeySet;
/// While an object of this type exists, this thread includes and excludes the given keys instead of
/// its own.
using RestoreKeys = c10::impl::ForceDispatchKeyGuard;

inline KeysOfThread keys_of_thread() {
  return c10::impl::tls_local_dispatch_key_set();
}

/// Whether the thread includes the key. Fast: reads thread-local memory once.
inline bool is_included(c10::DispatchKey key) {
  return c10::impl::tls_is_dispatch_key_included(key);
}

/// Whether autograd does not see the calls of this thread, as in autograd's own kernels.
inline bool is_below_autograd() {
  return c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

}  // namespace tessera::detail
TESSERA_API_END
