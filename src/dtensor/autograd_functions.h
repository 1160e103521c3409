#pragma once

#include <ATen/core/Tensor.h>

#include "tensor_spec.h"

namespace tessera::detail {

/// The layout that a gradient of a tensor of `layout` takes: the same, replicated where it is
/// partial (the derivative of a sum to each of its terms).
LayoutPtr gradient_layout(LayoutPtr layout);

/// Differentiable forms of from_local, to_local and redistribute; `gradient` is the layout that the
/// local gradient has or takes.
at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes, LayoutPtr gradient);
at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient);
/// `options.forward_dtype` is not read: the caller has cast.
at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const ShardingSpec& target,
                                      const RedistributeOptions& options = {});

/// `tensor` as a distributed one of `sharding`: a plain one counts as replicated. Differentiable.
at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding,
                     const RedistributeOptions& options = {});

}  // namespace tessera::detail
