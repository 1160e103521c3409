// Compiled with -march=x86-64-v4, so this code may run only if row_kernels() has selected it.
#define TESSERA_ISA avx512
#include "rows/row_kernels.inl"
