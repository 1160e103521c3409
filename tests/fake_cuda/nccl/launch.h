// From a call of NCCL to work on streams.
#pragma once

#include <vector>

#include "nccl/operation.h"

namespace fake_cuda {

/// Adds to the calling thread's open group or, outside of one, launches at once.
ncclResult_t call(Operation operation);

/// Runs in the calling thread, after all that was issued before. False if the peers do not come
/// within a few seconds, or the communicator is aborted.
bool run_on_host(const Operation& operation);

}  // namespace fake_cuda
