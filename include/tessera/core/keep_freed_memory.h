#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Has this process keep the memory that it frees, up to 2 GiB at a time, for allocations to come:
/// for a training loop, each step of which allocates the same. glibc otherwise returns large blocks
/// to the system and has it clear them again in the next step. To be called once a model is loaded.
/// It does nothing where glibc's variables for this are set (GLIBC_TUNABLES,
/// MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_), or with another C library.
void keep_freed_memory();

}  // namespace tessera
TESSERA_API_END
