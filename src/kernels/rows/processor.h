// Properties of the processor, and which fp32 matrix products oneDNN computes on it.
#pragma once

#include <cstdint>

#include "tessera/export.h"

namespace tessera::kernels {

// Properties of the processor, each determined once.

/// Whether the processor has the AVX-512 extensions of x86-64-v4.
inline bool has_avx512() {
#ifdef __x86_64__
  static const bool has =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  return has;
#else
  return false;
#endif
}

/// Whether the processor is made by AMD.
inline bool is_amd() {
#ifdef __x86_64__
  static const bool is = __builtin_cpu_is("amd") != 0;
  return is;
#else
  return false;
#endif
}

}  // namespace tessera::kernels

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::kernels {

// Which fp32 matrix products oneDNN computes. The choice depends only on the processor and the
// sizes, so that it is equal in every run and on every rank.

/// Whether MKL has no kernels for this processor's widest vectors. MKL has AVX-512 kernels for
/// Intel processors only, and uses AVX2 kernels on AMD's.
bool mkl_leaves_vectors_unused();

/// Whether a matrix product (rows, inner) x (inner, columns) is so large that oneDNN beats MKL.
bool gains_from_onednn(std::int64_t rows, std::int64_t inner, std::int64_t columns);

}  // namespace tessera::kernels
TESSERA_API_END
