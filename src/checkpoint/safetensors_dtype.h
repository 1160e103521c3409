#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

namespace tessera::checkpoint {

/// One of the types of the safetensors format.
struct SafetensorsDtype {
  std::string_view name;
  int bits;
  c10::ScalarType scalar_type;  ///< Undefined where libtorch has no such type
  int order;                    ///< the reference writes tensors by falling order, then by name
};

/// nullptr for a name that the format lacks.
const SafetensorsDtype* find_dtype(std::string_view name);
/// nullptr for a type that the format lacks.
const SafetensorsDtype* find_dtype(c10::ScalarType type);

}  // namespace tessera::checkpoint
