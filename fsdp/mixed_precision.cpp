#include "mixed_precision.h"

#include <algorithm>

namespace tessera::fsdp {
namespace {

bool is_floating(const at::Tensor* tensor) {
  return tensor->defined() && tensor->is_floating_point();
}

}  // namespace

std::optional<c10::ScalarType> floating_type(nn::TensorList tensors) {
  const auto first = std::ranges::find_if(tensors, is_floating);
  if (first == tensors.end()) {
    return std::nullopt;
  }
  return (*first)->scalar_type();
}

void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype) {
  if (!dtype) {
    return;
  }
  for (at::Tensor* tensor : tensors) {
    if (is_floating(tensor)) {
      *tensor = tensor->to(*dtype);
    }
  }
}

}  // namespace tessera::fsdp
