#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::testing {

/// The whole value of a tensor, distributed or plain, without its gradient; undefined if `tensor`
/// is. Collective if `tensor` is distributed.
inline at::Tensor full_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const c10::NoGradGuard no_grad;
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor()
                                         : tensor.detach();
}

}  // namespace tessera::testing
