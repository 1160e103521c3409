// Whether libtorch has found its CUDA half, and with which cuDNN. It checks once, at the first
// backward on a CPU for example, and remembers the result: torch::cuda::is_available() would run
// that check.
//
// No version differs.
//
// Canary: CudaPresenceCanary.
#pragma once

#include <optional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

bool has_found_cuda();

struct CudnnVersions {
  int built_with = 0;
  int loaded = 0;
};
/// nullopt: libtorch has none.
std::optional<CudnnVersions> cudnn_versions();

}  // namespace tessera::detail
TESSERA_API_END
