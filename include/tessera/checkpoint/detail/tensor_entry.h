#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

/// Dtype, sizes and position of a tensor, from the header of a safetensors file.
struct TensorEntry {
  std::string dtype_name;  ///< the type's name in the file: "F32", "BF16", ...
  c10::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::uint64_t offset = 0;  ///< offset of the tensor's first byte in the file
  std::uint64_t bytes = 0;
};

}  // namespace tessera::checkpoint
TESSERA_API_END
