// Compiled with -march=x86-64-v4, so its code must not run unless row_kernels() has selected it.
#define TESSERA_ISA avx512
#include "rows/row_kernels.inl"
