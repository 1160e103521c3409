// The processor, and which products of fp32 matrices oneDNN computes on it.
#pragma once

#include <cstdint>

#include "tessera/export.h"

namespace tessera::kernels {

// The processor, looked up once.

/// Whether it has the extensions of AVX-512 that x86-64-v4 stands for.
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

/// Whether AMD made it.
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

// Which products of fp32 matrices oneDNN computes, by processor and sizes alone: so that every run
// and every rank takes the same.

/// Whether MKL has no kernels for this processor's widest vectors. It has kernels of AVX-512 for
/// Intel's alone, and takes those of AVX2 on AMD's.
bool mkl_leaves_vectors_unused();

/// Whether a product (rows, inner) x (inner, columns) is large enough to gain from oneDNN.
bool gains_from_onednn(std::int64_t rows, std::int64_t inner, std::int64_t columns);

}  // namespace tessera::kernels
TESSERA_API_END
