#pragma once

#include "tessera/comm/streams.h"

namespace tessera::comm {

/// Lanes on the current CUDA device.
StreamsPtr make_cuda_streams();

}  // namespace tessera::comm
