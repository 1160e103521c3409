#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Records, for messages, that `tensor` is the parameter with the FQN `name`. libtorch stores the
/// name with the tensor's gradient, so copies and results do not have it.
void name_parameter(const at::Tensor& tensor, const std::string& fqn);

/// The FQN of `tensor` if it is a parameter or a view of a parameter; otherwise empty.
std::string parameter_name(const at::Tensor& tensor);

}  // namespace tessera::detail
TESSERA_API_END
