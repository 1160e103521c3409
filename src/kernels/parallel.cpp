// The code that uses OpenMP, which CMakeLists.txt enables for this file only.
#include "fused_dispatch.h"

#include <ATen/Parallel.h>

namespace tessera::kernels {

void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  c10::function_ref<void(std::int64_t, std::int64_t)> body) {
  at::parallel_for(begin, end, grain, body);
}

}  // namespace tessera::kernels
