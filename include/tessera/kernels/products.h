#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Lets oneDNN compute large fp32 matrix products (`mm`, `addmm`) of this process, on processors
/// for which MKL has no kernels of full vector width (AMD's with AVX-512). Does nothing on other
/// processors. Only the processor and the sizes determine whether a product uses oneDNN. Call
/// use_fast_products() in main().
void use_fast_products();

}  // namespace tessera::kernels
TESSERA_API_END
