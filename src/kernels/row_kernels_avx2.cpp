#define TESSERA_ISA avx2
#include "row_kernels.inl"
