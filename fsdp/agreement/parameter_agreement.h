#pragma once

#include <string>
#include <vector>

#include "comm/data_mesh.h"
#include "group/parameter_group.h"

namespace tessera::fsdp {

/// With TESSERA_DEBUG=1, throws Error unless all ranks of `mesh`, and of the groups' own meshes,
/// have parameters of the same names, sizes and types in the unit that messages call `label`: then
/// on all of them. Padded shards may be equal where the parameters are not. Collective then; else
/// it does nothing.
void check_same_parameters(std::vector<ParameterGroup>& groups, const DataMesh& mesh,
                           const std::string& label);

}  // namespace tessera::fsdp
