#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Notes, for messages, that `tensor` is the parameter of this FQN.
/// libtorch stores the name with the tensor's gradient: copies and results have none.
void name_parameter(const at::Tensor& tensor, const std::string& fqn);

/// The FQN of the parameter that `tensor` is, or is a view of; empty if it is none.
std::string parameter_name(const at::Tensor& tensor);

}  // namespace tessera::detail
TESSERA_API_END
