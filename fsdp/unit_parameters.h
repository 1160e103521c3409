#pragma once

#include <vector>

#include "sharded_parameter.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// `mesh` as the options say it is used. Throws Error if it cannot be.
DataMesh data_mesh_of(const DeviceMesh& mesh, const Options& options);

/// The parameters of `modules` and below them that belong to no unit yet and are not ignored.
/// Throws Error for one that a module outside shares.
nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules, const Options& options);

/// Throws Error for a parameter that cannot lie on `mesh` as the options say.
void check_parameters(const nn::NamedSlots& parameters, const DataMesh& mesh,
                      const Options& options);

/// Parameters of one type on one mesh.
struct GroupParameters {
  DataMesh mesh;
  std::vector<ShardedParameter> parameters;
};

/// Shards parameters that were checked. Not collective.
std::vector<GroupParameters> shard_parameters(const nn::NamedSlots& parameters,
                                              const DataMesh& mesh, const Options& options);

}  // namespace tessera::fsdp
