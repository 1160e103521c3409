// Dispatch keys that libtorch defines for others, borrowed for this library. A new key would need a
// place in libtorch's enum: there is no public way to add one, and PrivateUse1, the one that is
// offered, is a device's, below the others.
//
// A key's place among the others says who sees a call first. To 2.14 Fake is below Python's keys,
// from 2.15 above them: both are below autograd and above the backends. libtorch keeps Fake for
// fake tensors, whose fallbacks are in Python only.
//
// Canary: LentKeysCanary.
#pragma once

#include <c10/core/DispatchKey.h>

#include "tessera/export.h"

// As TORCH_LIBRARY_IMPL takes them.
#define TESSERA_DISTRIBUTED_KEY Fake
#define TESSERA_RANDOM_KEY DeferredInit
#define TESSERA_FAKE_MODE_KEY CustomRNGKeyId
#define TESSERA_PLACEHOLDER_KEY TESTING_ONLY_GenericWrapper

TESSERA_API_BEGIN
namespace tessera::detail {

/// The key of distributed tensors: below autograd, which sees one ordinary tensor, and above the
/// backends.
inline constexpr auto kDistributedKey = c10::DispatchKey::TESSERA_DISTRIBUTED_KEY;

/// The key of random operators in a RandomRegion: above autograd, where a tensor still has its
/// history. Only they have kernels for it, so that including it costs the others nothing.
inline constexpr auto kRandomKey = c10::DispatchKey::TESSERA_RANDOM_KEY;

/// The key of a FakeMode: below that of distributed tensors, so that it sees local tensors.
inline constexpr auto kFakeModeKey = c10::DispatchKey::TESSERA_FAKE_MODE_KEY;

/// The key of gradients that cannot be read: a tensor that has no other key.
inline constexpr auto kPlaceholderKey = c10::DispatchKey::TESSERA_PLACEHOLDER_KEY;

}  // namespace tessera::detail
TESSERA_API_END
