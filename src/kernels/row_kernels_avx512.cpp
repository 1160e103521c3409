#define TESSERA_ISA avx512
#include "row_kernels.inl"
