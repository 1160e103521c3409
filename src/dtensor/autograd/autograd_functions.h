#pragma once

#include <ATen/core/Tensor.h>

#include "tensor/tensor_spec.h"
#include "tessera/dtensor/redistribute_options.h"

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

}  // namespace tessera::detail
