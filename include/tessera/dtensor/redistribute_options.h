#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Options of a redistribution.
struct RedistributeOptions {
  /// The tensor is cast to this type first; the result has it.
  std::optional<c10::ScalarType> forward_dtype{};
  /// The gradient is cast to this type, redistributed back, and cast to the type of the tensor.
  std::optional<c10::ScalarType> backward_dtype{};
  /// Return while the last collective is under way. The first use of the values waits for it, and
  /// throws there if it failed; on CPU every later synchronous collective of a redistribution waits
  /// for it too. The gradient is redistributed in the same way.
  bool async = false;
};

}  // namespace tessera
TESSERA_API_END
