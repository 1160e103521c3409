#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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
TESSERA_API_END
