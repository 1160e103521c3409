#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::kernels {

/// at::parallel_for on libtorch's threads: calls body(begin, end) for parts of [begin, end) with at
/// least `grain` elements. Not inline, because the template needs OpenMP where it is compiled, and
/// only parallel.cpp is compiled with it.
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  c10::function_ref<void(std::int64_t, std::int64_t)> body);

}  // namespace tessera::kernels
