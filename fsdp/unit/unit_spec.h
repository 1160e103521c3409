#pragma once

#include <optional>
#include <vector>

#include "parameter/parameter_spec.h"
#include "tessera/core/placement.h"
#include "tessera/fsdp/options.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// `mesh` as the options say it is used. Throws Error if it cannot be.
DataMesh data_mesh_of(const DeviceMesh& mesh, const Options& options);

/// The parameters of `modules` and below them that belong to no unit yet and are not ignored.
/// Throws Error for one that a module outside shares.
nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules, const Options& options);

/// The results of the options' functions for a parameter. They are called once.
struct ParameterChoice {
  Placement placement;  ///< on the dimension that shards; a dimension >= 0, where it is in range
  DataMesh mesh;
  std::optional<AllGatherExtension> extension;
};

/// For each of `parameters`, of a unit on `mesh`. Throws Error for a mesh that cannot be used.
std::vector<ParameterChoice> choose(const nn::NamedSlots& parameters, const DataMesh& mesh,
                                    const Options& options);

/// All decisions about a unit before anything is changed.
struct UnitSpec {
  std::vector<nn::ModuleBase*> modules;
  DataMesh mesh;
  Options options;
  std::vector<ParameterSpec> parameters;
};

/// From modules, their parameters and what was chosen for each. Throws Error for a parameter that
/// cannot be placed on its mesh as the options say, and for one that gets sparse gradients.
UnitSpec checked_spec(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
                      const std::vector<ParameterChoice>& choices, const DataMesh& mesh,
                      const Options& options);

/// The parameters of a spec by type and mesh: each is a group.
std::vector<std::vector<ParameterSpec>> grouped(const UnitSpec& spec);

}  // namespace tessera::fsdp
