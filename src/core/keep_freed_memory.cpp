#include "tessera/core/keep_freed_memory.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tessera {
namespace {

[[maybe_unused]] bool chosen_by_user() {
  constexpr std::array kVariables = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_",
                                     "MALLOC_MMAP_THRESHOLD_"};
  return std::ranges::any_of(kVariables,
                             [](const char* name) { return std::getenv(name) != nullptr; });
}

}  // namespace

void keep_freed_memory() {
#ifdef __GLIBC__
  if (chosen_by_user()) {
    return;
  }
  // Free memory at the heap's end, and blocks that are not on the heap. To set one ends glibc's own
  // adjustment of both.
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
#endif
}

}  // namespace tessera
