// A tensor that libtorch has made of a number, as at::mul(x, 2.0) of its 2.0. It does not decide
// the type of a result as other tensors do. Only the tensor's impl says so.
//
// Inline: the key of every call asks. No version differs.
//
// Canary: WrappedNumberCanary.
#pragma once

#include <ATen/core/TensorBase.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

inline bool is_wrapped_number(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline void make_wrapped_number(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
}

}  // namespace tessera::detail
TESSERA_API_END
