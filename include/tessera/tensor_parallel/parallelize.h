#pragma once

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Applies a plan on a 1-D mesh. The parameters that the styles name become distributed as these
/// say, all others Replicate(), so that their gradients are right, except parameters that differ on
/// each rank (ParameterSlot::set_distinct_along). Several styles may add hooks to a module, but
/// only one may place its parameters. In the forward of `module` a tensor is distributed, or it is
/// plain and the same on every rank of `mesh`: plain tensors that meet distributed ones count as
/// replicated, and get gradients that are plain and whole. observe::verify compares a step with one
/// rank's. Call it before fully_shard. Not collective: every rank has the values and keeps its
/// shard. In the first forward the ranks compare the values of parameters that are not split, and
/// of the plain inputs. Throws Error, before anything is changed, for a pattern that matches no
/// module, or only below some of the modules of one class that its wildcard stands for; a style
/// that does not fit its module, heads that the ranks don't divide; and a parameter that is
/// distributed already. PyTorch's parallelize_module.
///
///   parallelize_module(model, mesh["tp"], {{"layers.*.mlp.up_proj", colwise_parallel()},
///                                          {"layers.*.mlp.down_proj", rowwise_parallel()}});
void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh,
                        const ParallelizePlan& plan);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
