// The row kernels without instruction-set extensions, and the function that selects row kernels at
// run time. Both must run on every processor of the architecture.
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
  // Processors with AVX2 also have the other instructions of x86-64-v3.
  static const RowKernelTable& best = has_avx512()                     ? avx512::kTable
                                      : __builtin_cpu_supports("avx2") ? avx2::kTable
                                                                       : baseline::kTable;
  return best;
#else
  return baseline::kTable;
#endif
}

}  // namespace tessera::kernels
