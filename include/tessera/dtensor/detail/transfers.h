// Work that must be done before a collective starts or a backward ends.
#pragma once

#include <functional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

namespace comm {
class Communicator;
}

/// Finishes the transfers that this rank runs in the background
/// (RedistributeOptions::async), its backward's too, and returns `group`. For a collective that is
/// waited for at once: ranks may use the results of those transfers in different orders, and would
/// otherwise wait for one another. On CPU; on a GPU the streams keep the order. Does not throw: a
/// transfer that failed throws where its result is used. Not collective.
///
///     flush_pending_transfers(group).all_reduce(sums, ReduceOp::kSum)->wait();
comm::Communicator& flush_pending_transfers(comm::Communicator& group);

}  // namespace tessera

namespace tessera::detail {

/// Calls `callback` when the current backward has ended, with the state of the calling rank
/// (counts, random numbers, waits), on any thread of autograd. Must be called within a backward or
/// such a callback. Callbacks run in the order of these calls.
void call_at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::detail
TESSERA_API_END
