// Compiled with -march=x86-64-v3, so its code must not run unless row_kernels() has selected it.
#define TESSERA_ISA avx2
#include "rows/row_kernels.inl"
