// The row kernels for any processor of the architecture. The selection among all row kernels is in
// this file too, because it must run on every processor.
#define TESSERA_ISA baseline
#include "rows/row_kernels.inl"

namespace tessera::kernels {

bool has_avx512() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
#else
  return false;
#endif
}

const RowKernelTable& row_kernels() {
#ifdef __x86_64__
  // The test for AVX2 stands for x86-64-v3, because processors with AVX2 have all instructions of
  // that level.
  static const RowKernelTable& best = has_avx512()                     ? avx512::kTable
                                      : __builtin_cpu_supports("avx2") ? avx2::kTable
                                                                       : baseline::kTable;
  return best;
#else
  return baseline::kTable;
#endif
}

}  // namespace tessera::kernels
