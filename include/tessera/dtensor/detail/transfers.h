// Callbacks at the end of a backward, and pending transfers that must finish before a collective
// starts.
#pragma once

#include <functional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

namespace comm {
class Communicator;
}

/// Finishes this rank's background transfers (RedistributeOptions::async), including those of its
/// backward, and returns `group`. Call it before a collective that is waited for at once: ranks may
/// use the results of background transfers in different orders, and would otherwise wait for one
/// another. Only a CPU needs this; on a GPU the streams preserve the order. Does not throw: a
/// failed transfer throws when its result is used. Not collective.
///
///     flush_pending_transfers(group).all_reduce(sums, ReduceOp::kSum)->wait();
comm::Communicator& flush_pending_transfers(comm::Communicator& group);

}  // namespace tessera

namespace tessera::detail {

/// Calls `callback` at the end of the current backward. The callback may run on any autograd
/// thread, but uses the state of the calling rank (counts, random numbers, pending transfers). Must
/// be called inside a backward or inside such a callback. Callbacks run in the order of
/// registration.
void call_at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::detail
TESSERA_API_END
