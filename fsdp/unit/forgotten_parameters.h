#pragma once

#include "comm/data_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Throws Error, naming them, for parameters below `module` that are trained and in no unit, while
/// a unit on `mesh` runs in its forward: their gradients would not be reduced over the ranks. Not
/// for those that Options::ignored names. Not collective, and the same on all ranks.
void refuse_forgotten_parameters(const nn::ModuleBase& module, const DataMesh& mesh);

}  // namespace tessera::fsdp
