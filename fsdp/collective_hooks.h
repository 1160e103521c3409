#pragma once

#include "tessera/fsdp/collectives.h"

namespace tessera::fsdp {

/// What replaces or follows the collectives of a unit; empty functions: nothing does.
struct CollectiveHooks {
  AllGather all_gather;
  ReduceScatter reduce_scatter;
  AllReduceHook all_reduce;
};

}  // namespace tessera::fsdp
