#include "tessera/internals/detail/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>

namespace tessera::detail {

c10::Allocator* cpu_allocator() {
  return c10::GetCPUAllocator();
}

void set_cpu_allocator(c10::Allocator* allocator) {
  c10::SetCPUAllocator(allocator, /*priority=*/255);
}

}  // namespace tessera::detail
