// libtorch's state of a thread: dispatch keys, gradient mode, debug info, callbacks. Used to
// continue a call on another thread, as libtorch's backward and at::parallel_for do.
// torch::autograd has no name for it.
//
// No version differs.
//
// Canary: StateOfThreadCanary.
#pragma once

#include <ATen/ThreadLocalState.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The state of the thread that makes it.
using StateOfThread = at::ThreadLocalState;
/// While one exists, this thread has that state.
using StateOfThreadScope = at::ThreadLocalStateGuard;

}  // namespace tessera::detail
TESSERA_API_END
