#pragma once

#include <functional>
#include <string>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Makes the parameters of one module, not of those below it, distributed: calls
/// distribute_parameter() for its slots. `name`: its FQN, "" for the root.
using PartitionFunction =
    std::function<void(const std::string& name, ModuleBase& module, const DeviceMesh& mesh)>;
/// Gets the tensors of the root module's arguments or result, and may replace them.
using BoundaryFunction = std::function<void(TensorList tensors, const DeviceMesh& mesh)>;

/// Makes every parameter and buffer of `module` and below distributed. `partition` is called once
/// for each module, parents first; parameters that it leaves plain are replicated. `input` and
/// `output` run before and after every call of the root. Not collective: the values are the same on
/// every rank, and each keeps its shard. Throws Error for a module that was distributed before, and
/// for a child that has parameters but no slots. PyTorch's distribute_module.
void distribute_module(ModuleBase& module, const DeviceMesh& mesh,
                       const PartitionFunction& partition = nullptr,
                       const BoundaryFunction& input = nullptr,
                       const BoundaryFunction& output = nullptr);

/// Makes the parameter or buffer in `slot`, plain and the same on every rank, distributed. Each
/// rank keeps its shard; requires_grad stays. Not collective. Throws Error if it is distributed
/// already or belongs to an FSDP unit. `by`: the caller, for messages.
void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by = "distribute_parameter");

}  // namespace tessera::nn
TESSERA_API_END
