#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "tensor_spec.h"

namespace tessera::detail {

/// The layout that a gradient of a tensor of `layout` takes: the same, replicated where it is
/// partial (the derivative of a sum to each of its terms).
LayoutPtr gradient_layout(LayoutPtr layout);

/// Differentiable forms of from_local, to_local and redistribute.
at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes);
at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient);
/// `backward_dtype`: the type in which the gradient travels back.
at::Tensor redistribute_with_gradient(const at::Tensor& tensor, LayoutPtr target,
                                      std::optional<c10::ScalarType> backward_dtype = {});

/// `tensor` as a distributed one of `sharding`: a plain one counts as replicated. Differentiable.
at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding);

}  // namespace tessera::detail
