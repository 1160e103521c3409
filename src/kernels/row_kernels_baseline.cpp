#define TESSERA_ISA baseline
#include "row_kernels.inl"
