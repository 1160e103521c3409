#include "tessera/dtensor/detail/parameter_name.h"

#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

void name_parameter(const at::Tensor& tensor, const std::string& fqn) {
  if (tensor.defined() && tensor.name() != fqn) {
    set_name(tensor, fqn);
  }
}

std::string parameter_name(const at::Tensor& tensor) {
  // at::linear computes with the weight's transpose.
  return tensor.name().empty() && tensor.is_view() ? tensor._base().name() : tensor.name();
}

}  // namespace tessera::detail
