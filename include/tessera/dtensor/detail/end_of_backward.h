#pragma once

#include <functional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Calls `callback` when the backward that runs has ended, for the rank that asks: what it counts,
/// draws and waits for is this rank's, on whichever thread of autograd it is called. From within a
/// backward or such a callback; then it is called after those that were queued before.
void call_at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::detail
TESSERA_API_END
