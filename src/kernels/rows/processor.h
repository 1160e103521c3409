// What the processor is, asked once.
#pragma once

namespace tessera::kernels {

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
