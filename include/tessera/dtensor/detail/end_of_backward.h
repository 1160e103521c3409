#pragma once

#include <functional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Calls `callback` when the current backward has ended, on behalf of the rank that calls this: its
/// counts, random numbers and waits are this rank's, on any thread of autograd. From within a
/// backward or such a callback; then it is called after those that were queued before.
void call_at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::detail
TESSERA_API_END
