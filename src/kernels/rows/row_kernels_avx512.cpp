// Compiled with -march=x86-64-v4, and therefore not to be run before row_kernels() has chosen it.
#define TESSERA_ISA avx512
#include "rows/row_kernels.inl"
