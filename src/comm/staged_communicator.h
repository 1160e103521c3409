#pragma once

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Collectives of CUDA tensors through `host`, a communicator of CPU tensors: for ranks that share
/// a GPU, which NCCL refuses. Inputs are copied to pinned memory by the call, which therefore waits
/// for the current stream; results are copied back, on the then current stream, by Work::wait().
CommunicatorPtr make_staged_communicator(CommunicatorPtr host);

}  // namespace tessera::comm
