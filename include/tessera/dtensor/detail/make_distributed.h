// Functions that make distributed tensors and record the names of parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/dtensor/sharding_spec.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Makes a distributed tensor with global `sizes` and local tensor `local`, without autograd
/// history. Throws Error unless `local` has the sizes of this rank's shard. Not collective.
at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes);

}  // namespace tessera

namespace tessera::detail {

/// Records for error messages that `tensor` is the parameter with the FQN `name`. Copies of
/// `tensor` and results of operators on `tensor` do not have the name.
void name_parameter(const at::Tensor& tensor, const std::string& fqn);

/// Returns the FQN of `tensor` if `tensor` is a parameter or a view of a parameter; otherwise "".
std::string parameter_name(const at::Tensor& tensor);

}  // namespace tessera::detail
TESSERA_API_END
