#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/core/sharding_rule.h"

namespace tessera::detail {

// The library's operators on a shard of the tensor that the original picks from.
// tessera_local::embedding_rows and tessera_local::gather_part take, beside the original's
// arguments, where the shard begins and the size of the whole dimension. Elements of other ranks
// are zero in their result, which is Partial(sum). An index outside of the whole dimension throws
// on a CPU. On a GPU embedding_rows asserts that on the device, and gather_part does not check it.

/// The operator that works on a shard as `part` says.
c10::OperatorHandle find_part_operator(ShardingRule::LocalCall::PartOperator part);

}  // namespace tessera::detail
