// Compiled with -march=x86-64-v3, and therefore not to be run before row_kernels() has chosen it.
#define TESSERA_ISA avx2
#include "rows/row_kernels.inl"
