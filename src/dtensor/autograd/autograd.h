// Differentiable from_local, to_local and redistribute; the gradients of leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor/distributed_impl.h"
#include "tensor/tensor_spec.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// Differentiable from_local, to_local and redistribute. `gradient`: the layout of the local
/// gradient that from_local gives, and that to_local takes.
at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes, LayoutPtr gradient);
at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient);
/// Does not read `options.forward_dtype`: the caller has cast.
at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const ShardingSpec& target,
                                      const RedistributeOptions& options = {});

/// `tensor` redistributed to `sharding`; a plain tensor counts as replicated. Differentiable.
at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding,
                     const RedistributeOptions& options = {});

void install_gradient_hook(DistributedTensorImpl& impl, const at::Tensor& tensor);

/// Installs the hook that redistributes the gradient of a leaf to the leaf's layout (replicated
/// where the leaf is partial), whatever layout backward gives it. Called when an operator first
/// meets the leaf, before it can have a gradient.
inline void keep_gradient_layout(DistributedTensorImpl& impl, const at::Tensor& tensor) {
  if (!impl.has_autograd_state() || impl.has_gradient_hook()) {
    return;
  }
  if (is_trainable_leaf(impl)) {
    install_gradient_hook(impl, tensor);
  }
}

/// Installs the hook that makes the gradient of a plain tensor plain and whole, even if the
/// operators give it a distributed one. Called when an operator meets it beside a distributed
/// tensor, and does nothing where autograd does not record. The hook is collective where the
/// gradient is split or a pending sum.
void keep_gradient_plain(const at::Tensor& tensor);

}  // namespace tessera::detail
