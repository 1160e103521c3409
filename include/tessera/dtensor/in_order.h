#pragma once

namespace tessera {

namespace comm {
class Communicator;
}

/// `group`, for a collective that is waited for at once: on CPU what this thread has under way in
/// the background (RedistributeOptions::async) is finished first, so that ranks that use their
/// results in unlike orders don't wait for one another. Failures are thrown where those results are
/// used.
///
///     in_order(group).all_reduce(sums, ReduceOp::kSum)->wait();
comm::Communicator& in_order(comm::Communicator& group);

}  // namespace tessera
