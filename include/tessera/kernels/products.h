#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Makes oneDNN compute large fp32 matrix products (`mm`, `addmm`) of this process on AMD
/// processors with AVX-512, where MKL uses only AVX2. Does nothing on other processors. Call
/// use_fast_products() in main().
void use_fast_products();

}  // namespace tessera::kernels
TESSERA_API_END
