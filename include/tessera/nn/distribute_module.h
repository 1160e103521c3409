#pragma once

#include <functional>
#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// Places the parameters of one module (not of those below it) on the mesh: puts distributed
/// tensors in its slots, with distribute_parameter(). `name`: its FQN, "" for the root.
using PartitionFunction =
    std::function<void(const std::string& name, ModuleBase& module, const DeviceMesh& mesh)>;
/// Sees the tensors of the root module's arguments or result, and may replace them.
using BoundaryFunction = std::function<void(TensorList tensors, const DeviceMesh& mesh)>;

/// Makes every parameter and buffer of `module` distributed: `partition` is called for each module,
/// parents first; what it leaves plain is replicated. `input` and `output` run before and after
/// every call of the root. Not collective: values are the same on every rank, and sliced. Without
/// functions: the whole module replicated. Throws Error for a module that was distributed so
/// before, and for one whose children have parameters but no slots. PyTorch's distribute_module.
void distribute_module(ModuleBase& module, const DeviceMesh& mesh,
                       const PartitionFunction& partition = nullptr,
                       const BoundaryFunction& input = nullptr,
                       const BoundaryFunction& output = nullptr);

/// Spreads the parameter or buffer in `slot`, plain and the same on every rank, over the mesh.
/// Whether it requires a gradient stays; this rank keeps its part alone. Throws Error if it is
/// distributed or belongs to an FSDP unit. `by`: whom messages name.
void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by = "distribute_parameter");

}  // namespace tessera::nn
