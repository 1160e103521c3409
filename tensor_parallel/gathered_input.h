#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// Gathers `shard`, split over its 1-D mesh, to every rank. Collective. Only the shard is kept for
/// backward (Korthikanti et al. 2022, section 4.2.2): the products by regathered_product() share
/// one gather there. Gradient: a reduce-scatter that is waited for where its result is used; the
/// products' weights get their gradients meanwhile.
at::Tensor gather_again_in_backward(const DistributedTensor& shard);

/// nn::LinearProduct of a weight that is split over its outputs. If x comes from
/// gather_again_in_backward(), it keeps only the weight for backward; otherwise it is aten::linear.
/// Throws Error from backward, if that should be differentiated itself.
at::Tensor regathered_product(const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& bias);

/// Makes an nn::Linear use it, if `regather`, an option of its style, asks for it. Other modules
/// keep the gathered tensor.
void set_regathered_product(nn::ModuleBase& module, bool regather);

}  // namespace tessera::tensor_parallel
