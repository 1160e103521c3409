// Whether the current stream is captured into a CUDA graph, in which an event that is recorded may
// not be asked later. Public is CUDA's own function, which makes a context where there is none.
//
// For libtessera_cuda.so. No version differs.
//
// Canary: C10dNcclCanary.
#pragma once

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

inline bool is_captured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace tessera::detail
TESSERA_API_END
