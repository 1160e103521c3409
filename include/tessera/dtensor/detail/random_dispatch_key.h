#pragma once

#include <c10/core/DispatchKey.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The key of random operators in a RandomRegion. libtorch reserves it for use outside of its tree;
/// it is above autograd. Only random operators have kernels for it (plain_random.cpp), so that
/// including it costs the others nothing.
inline constexpr c10::DispatchKey kRandomDispatchKey = c10::DispatchKey::DeferredInit;

}  // namespace tessera::detail
TESSERA_API_END
