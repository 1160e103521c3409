// Which products of fp32 matrices oneDNN computes, by processor and sizes alone: so that every run
// and every rank takes the same.
#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

/// Whether MKL has no kernels for this processor's widest vectors. It has kernels of AVX-512 for
/// Intel's alone, and takes those of AVX2 on AMD's.
bool mkl_leaves_vectors_unused();

/// Whether a product (rows, inner) x (inner, columns) is large enough to gain from oneDNN.
bool gains_from_onednn(std::int64_t rows, std::int64_t inner, std::int64_t columns);

}  // namespace tessera::kernels
TESSERA_API_END
