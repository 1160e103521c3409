#pragma once

#include <vector>

#include "sharded_parameter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Shards the parameters of `module` and below it that belong to no unit yet. One list for each
/// type of parameter. Throws Error, before anything is changed, for a parameter that a module
/// outside of `module` shares.
std::vector<std::vector<ShardedParameter>> shard_parameters(nn::ModuleBase& module,
                                                            const DeviceMesh& mesh);

}  // namespace tessera::fsdp
