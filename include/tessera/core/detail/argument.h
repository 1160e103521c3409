#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// A tensor argument of an operator: its index in OpCall::tensors, or -1 for a None in a list.
struct TensorRef {
  int index = -1;
  friend bool operator==(const TensorRef&, const TensorRef&) = default;
};

/// An element type in a call, such as the target type of a cast, for a sharding rule.
struct DType {
  enum class Kind : std::uint8_t {
    kBool,
    kUnsigned,
    kSigned,
    kFloating,
    kComplex,
    kOther,  ///< quantised, packed or 8-bit floating-point types, and any other type
  };
  Kind kind = Kind::kOther;
  std::int64_t itemsize = 1;  ///< bytes of one element
  /// The number of the type in libtorch. No sharding rule reads this number.
  std::int64_t id = 0;
  friend bool operator==(const DType&, const DType&) = default;
};

/// An operator's argument, as a value that does not depend on libtorch. std::monostate stands for
/// None, or an argument that no sharding rule reads, such as a generator.
using Argument = std::variant<std::monostate, bool, std::int64_t, double, std::string, DType,
                              std::vector<std::int64_t>, TensorRef, std::vector<TensorRef>>;

}  // namespace tessera
TESSERA_API_END
