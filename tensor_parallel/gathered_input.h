#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/linear.h"

namespace tessera::tensor_parallel {

/// Gathers `shard`, split over its 1-D mesh, to every rank. Collective. Only the shard is kept for
/// backward (Korthikanti et al. 2022, section 4.2.2): the products by regathered_product() share
/// one gather there. Gradient: a reduce-scatter that is waited for where its result is used; the
/// products' weights get their gradients meanwhile.
at::Tensor gather_again_in_backward(const DistributedTensor& shard);

/// The product of `linear`, of a weight that is split over its outputs. If x comes from
/// gather_again_in_backward(), it keeps only the weight for backward; otherwise it is aten::linear,
/// or that in fp8 for a module that convert_to_fp8 has converted. Throws Error from backward, if
/// that should be differentiated itself.
nn::LinearProduct regathered_product(const nn::Linear& linear);

/// Makes an nn::Linear use it, if `regather`, an option of its style, asks for it. Other modules
/// keep the gathered tensor.
void set_regathered_product(nn::ModuleBase& module, bool regather);

/// Brings the first argument of each call of `module` whole to every rank, as prepare_input() does.
/// `plain`: the placement of a plain one.
void add_gathering_hook(nn::ModuleBase& module, const DeviceMesh& mesh, const Placement& plain,
                        bool regather);

}  // namespace tessera::tensor_parallel
