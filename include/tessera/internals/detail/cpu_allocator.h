// An allocator in front of libtorch's own for the CPU. c10::Allocator is to be derived from; that
// the process uses one, before others that were set, is a function that libtorch exports without
// documentation.
//
// No version differs.
//
// Canary: CpuAllocatorCanary.
#pragma once

#include <c10/core/Allocator.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

c10::Allocator* cpu_allocator();
/// For good: tensors may outlive main(), and so must `allocator`.
void set_cpu_allocator(c10::Allocator* allocator);

}  // namespace tessera::detail
TESSERA_API_END
