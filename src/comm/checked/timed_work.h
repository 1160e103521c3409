#pragma once

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"

namespace tessera::comm {

/// Notes in `call` that it has returned, and later how long the first wait for `work` took. Returns
/// `work` itself where there is no recorder (`call` is nullptr).
WorkPtr timed(const TrafficCounterPtr& traffic, const CollectiveCallPtr& call, WorkPtr work);

}  // namespace tessera::comm
