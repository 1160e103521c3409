// Constants by which RMSNorm handles rows with huge elements, on a CPU and on CUDA.
#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Scale factor for elements whose squares would overflow in fp32.
constexpr float kShrink = 0x1p-80F;
/// Rows with a smaller 1 / rms have elements so large that a product with a gradient may overflow.
constexpr float kHugeRstd = 0x1p-40F;

}  // namespace tessera::kernels
TESSERA_API_END
