// The row kernels for any processor of the architecture, and the selection among all row kernels,
// which is in this file because it runs on every processor.
#define TESSERA_ISA baseline
#include "rows/processor.h"
#include "rows/row_kernels.inl"

namespace tessera::kernels {

const RowKernelTable& row_kernels() {
#ifdef __x86_64__
  // AVX2 stands for x86-64-v3: processors with AVX2 have the rest of that level.
  static const RowKernelTable& best = has_avx512()                     ? avx512::kTable
                                      : __builtin_cpu_supports("avx2") ? avx2::kTable
                                                                       : baseline::kTable;
  return best;
#else
  return baseline::kTable;
#endif
}

}  // namespace tessera::kernels
