// Differentiable from_local, to_local and redistribute, and hooks on the gradients of leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor/distributed_impl.h"
#include "tensor/tensor_spec.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// Differentiable from_local and to_local. `gradient`: the layout of the local tensor's gradient,
/// which is the result of from_local's backward and the input of to_local's backward.
at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes, LayoutPtr gradient);
at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient);
at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const ShardingSpec& target,
                                      const RedistributeOptions& options = {});

/// Redistributes `tensor` to `sharding`; a plain tensor counts as replicated. Differentiable.
at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding,
                     const RedistributeOptions& options = {});

void install_gradient_hook(DistributedTensorImpl& impl, const at::Tensor& tensor);

/// Installs the hook that redistributes a leaf's gradient to the leaf's layout, with Replicate for
/// Partial. Must be called when an operator first uses the leaf.
inline void keep_gradient_layout(DistributedTensorImpl& impl, const at::Tensor& tensor) {
  if (!impl.has_autograd_state() || impl.has_gradient_hook()) {
    return;
  }
  if (is_trainable_leaf(impl)) {
    install_gradient_hook(impl, tensor);
  }
}

/// Installs the hook that converts a plain tensor's distributed gradient to a plain, complete
/// gradient. `tensor` must require grad. The hook is collective if the gradient is sharded or
/// Partial.
void keep_gradient_plain(const at::Tensor& tensor);

}  // namespace tessera::detail
