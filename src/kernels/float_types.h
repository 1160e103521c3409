// Maps a libtorch scalar type, known at run time, to a C++ type. CPU and CUDA code share this
// header, so that both accept the same types and give the same message.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/core/error.h"

namespace tessera::kernels {

/// Calls body.operator()<T>() with the C++ type of a floating-point scalar type. Throws Error for
/// other types; `what` completes the message, for example: "dropout of a Long tensor was asked
/// for".
template <class Body>
decltype(auto) with_float_type(c10::ScalarType type, const char* what, Body&& body) {
  switch (type) {
    case c10::ScalarType::Float:
      return body.template operator()<float>();
    case c10::ScalarType::Double:
      return body.template operator()<double>();
    case c10::ScalarType::BFloat16:
      return body.template operator()<c10::BFloat16>();
    case c10::ScalarType::Half:
      return body.template operator()<c10::Half>();
    default:
      fail(what, " of a ", type, " tensor was asked for; it takes fp32, fp64, bf16 or fp16");
  }
}

}  // namespace tessera::kernels
