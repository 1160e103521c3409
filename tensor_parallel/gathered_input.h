#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// `shard`, split over its 1-D mesh, on every rank. Collective. For backward only the shard is kept
/// (Korthikanti et al. 2022, section 4.2.2): products by regathered_product() gather it again, all
/// of them once. Gradient: a reduce-scatter that is waited for where its result is used; the
/// products' weights get their gradients meanwhile.
at::Tensor gather_again_in_backward(const DistributedTensor& shard);

/// nn::LinearProduct of a weight that is split over its outputs. Of an x from
/// gather_again_in_backward() it keeps nothing but the weight for backward; of any other it is
/// aten::linear. Throws Error from backward, if that should be differentiated itself.
at::Tensor regathered_product(const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& bias);

/// An nn::Linear computes so from now on, if `regather`, an option of its style, asks for it. Other
/// modules keep what was gathered.
void set_regathered_product(nn::ModuleBase& module, bool regather);

}  // namespace tessera::tensor_parallel
