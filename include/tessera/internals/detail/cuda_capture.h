// Whether the current stream is captured into a CUDA graph. An event recorded there may not be
// queried later. The public function is CUDA's, which creates a context where there is none.
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
