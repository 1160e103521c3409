#pragma once

#include <functional>
#include <string>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A function that distributes the parameters of one module, without the children of the module.
/// The function calls distribute_parameter() for the parameter slots of the module. `name`: the
/// module's FQN, "" for the root.
using PartitionFunction =
    std::function<void(const std::string& name, ModuleBase& module, const DeviceMesh& mesh)>;
/// A function that is called with the tensors of the root module's arguments or result. The
/// function may replace these tensors.
using BoundaryFunction = std::function<void(TensorList tensors, const DeviceMesh& mesh)>;

/// Distributes every parameter and buffer of `module` and of the modules below it. `partition` is
/// called once for each module, parents first. Parameters that are plain after the call of
/// `partition` become replicated. `input` and `output` run before and after every call of the root
/// module. Not collective: the values must be equal on every rank, and each rank stores only its
/// shard. Throws Error for a module that was distributed before, and for a child with parameters
/// that is not a ModuleBase. Like PyTorch's distribute_module.
void distribute_module(ModuleBase& module, const DeviceMesh& mesh,
                       const PartitionFunction& partition = nullptr,
                       const BoundaryFunction& input = nullptr,
                       const BoundaryFunction& output = nullptr);

/// Distributes the parameter or buffer in `slot`, which must be plain and the same on every rank.
/// Each rank stores only its shard; requires_grad is unchanged. Not collective. Throws Error if the
/// tensor is already distributed or belongs to an FSDP unit. `by`: the caller's name, for messages.
void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by = "distribute_parameter");

}  // namespace tessera::nn
TESSERA_API_END
