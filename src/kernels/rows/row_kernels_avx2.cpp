// Compiled with -march=x86-64-v3, so this code may run only if row_kernels() has selected it.
#define TESSERA_ISA avx2
#include "rows/row_kernels.inl"
