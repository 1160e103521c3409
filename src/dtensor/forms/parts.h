#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../bound_call.h"
#include "../distributed_impl.h"

namespace tessera::detail {

using Dims = std::vector<std::int64_t>;

/// The distributed tensor that `arg` is; nullptr if it is None, plain, or a pending reduction,
/// which no form takes.
const DistributedTensorImpl* settled_argument(const BoundCall& call, std::size_t arg);
/// The impl of a tensor that is known to be distributed.
const DistributedTensorImpl& impl_of(const at::Tensor& tensor);

/// The dimensions that argument `arg` names, from 0, ascending; all if it is None or empty.
Dims named_dims(const OpCall& call, std::size_t arg, std::int64_t ndim);
Dims all_dims(std::int64_t ndim);

/// The mesh dimensions that split one of `dims`, in the order of the dimensions and their digits.
std::vector<int> splitting(LayoutPtr layout, const Dims& dims);
/// Ranks in a group over those mesh dimensions.
std::int64_t group_size(LayoutPtr layout, const std::vector<int>& mesh_dims);

/// Elements of `tensor` along `dims`, whole; and in the largest part, in all other dimensions.
std::int64_t count_along(const TensorSpec& spec, const Dims& dims);
std::int64_t local_results(const TensorSpec& spec, const Dims& dims);
/// That one rank sends in an all-reduce of `numel` elements over the ranks that split `dims`.
double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements);

/// Sizes and layout of a reduction's result. `partial`: pending over what splits `dims`.
struct Reduced {
  std::vector<std::int64_t> sizes;
  LayoutPtr layout = nullptr;
};
Reduced reduced(const TensorSpec& spec, const Dims& dims, bool keepdim,
                std::optional<ReduceOp> partial = {});

/// `tensor` with pending reductions carried out. Collective if there are any.
at::Tensor settled(const at::Tensor& tensor);
/// Several pending tensors of one shape and layout, with one collective.
std::vector<at::Tensor> settled_together(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
