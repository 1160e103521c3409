#include "mixed_precision.h"

namespace tessera::fsdp {

void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype) {
  if (!dtype) {
    return;
  }
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point()) {
      *tensor = tensor->to(*dtype);
    }
  }
}

}  // namespace tessera::fsdp
