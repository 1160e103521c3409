#include "row_kernels.h"

namespace tessera::kernels {

const RowKernelTable& row_kernels() {
  static const RowKernelTable& best =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
          ? avx512::kTable
      : __builtin_cpu_supports("avx2") ? avx2::kTable
                                       : baseline::kTable;
  return best;
}

}  // namespace tessera::kernels
