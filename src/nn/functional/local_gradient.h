#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::nn {

/// Where a function's tensor lies: nullopt for a plain one.
using MaybeSpec = std::optional<ShardingSpec>;

MaybeSpec spec_of(const at::Tensor& tensor);
/// `local` as a tensor that lies as `spec` says: itself where it is plain.
at::Tensor wrap_local(const at::Tensor& local, const MaybeSpec& spec,
                      const std::vector<std::int64_t>& sizes);
/// This rank's part of a gradient that must lie as `spec` says: redistributed if it does not.
at::Tensor local_gradient(const at::Tensor& grad, const MaybeSpec& spec);

/// Throws Error in a backward pass that is itself recorded: `function` is differentiable once.
void refuse_double_backward(const char* function);
/// Throws Error for a distributed tensor that is a pending reduction.
void refuse_partial(const char* function, const MaybeSpec& spec);

}  // namespace tessera::nn
