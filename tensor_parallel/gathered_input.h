#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/linear.h"

namespace tessera::tensor_parallel {

/// Gathers `shard`, a shard on a 1-D mesh, on every rank. Collective. Only the shard is saved for
/// backward, which gathers the shard again (Korthikanti et al. 2022, section 4.2.2). All products
/// by regathered_product() share this second gather. The gradient is reduce-scattered
/// asynchronously, while the gradients of the weights are computed.
at::Tensor gather_again_in_backward(const DistributedTensor& shard);

/// The product of `linear` with a weight that is sharded over its outputs. If
/// gather_again_in_backward() made x, only the weight is saved for backward. Otherwise the product
/// is that of aten::linear, or the fp8 product if convert_to_fp8 has converted the module. Backward
/// throws Error under create_graph.
nn::LinearProduct regathered_product(const nn::Linear& linear);

/// Makes an nn::Linear use regathered_product() if `regather` is true. Does nothing for other
/// modules.
void set_regathered_product(nn::ModuleBase& module, bool regather);

}  // namespace tessera::tensor_parallel
