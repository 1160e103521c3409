#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Makes oneDNN compute the large fp32 matrix products (`mm`, `addmm`) of this process on AMD
/// processors with AVX-512, where MKL uses only the narrower AVX2 vectors. Does nothing on other
/// processors. Only the processor and the sizes determine whether a product uses oneDNN. Call
/// use_fast_products() in main().
void use_fast_products();

}  // namespace tessera::kernels
TESSERA_API_END
