#pragma once

#include <string>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Which ranks hold which block of a tensor of one or two dimensions, as a table of text: a row for
/// each range of dimension 0, a column for each of dimension 1. Not collective. Throws Error for
/// other numbers of dimensions. PyTorch's visualize_sharding.
///
///   [7, 4] on (dp=2, tp=2): Shard(0), Shard(1)
///            0:2    2:4
///   0:4      0      1
///   4:7      2      3
std::string visualize(const DistributedTensor& tensor);

}  // namespace tessera
TESSERA_API_END
