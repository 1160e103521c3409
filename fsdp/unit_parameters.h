#pragma once

#include <vector>

#include "sharded_parameter.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Shards the parameters of `modules` and below them that belong to no unit yet. One list for each
/// type of parameter. Throws Error, before anything is changed, for a parameter that a module
/// outside shares, or one that cannot lie as the options say.
std::vector<std::vector<ShardedParameter>> shard_parameters(
    const std::vector<nn::ModuleBase*>& modules, const DataMesh& mesh, const Options& options);

}  // namespace tessera::fsdp
