// Properties of the processor.
#pragma once

namespace tessera::kernels {

/// Whether the processor has the AVX-512 extensions of x86-64-v4. Determined once.
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

}  // namespace tessera::kernels
