// Views of distributed tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/distributed_impl.h"

namespace tessera::detail {

/// The strides that the results of a view operator have on tensors of global sizes, lists
/// flattened: the operator is run on meta tensors. Local strides would not do: a dimension of local
/// size 1 may have any stride, and ranks would disagree. Throws what the operator throws, on every
/// rank alike. nullopt if the operator does not run on meta tensors.
std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

/// `to`, with its -1 filled in where a tensor of sizes `from` has no elements, for which libtorch
/// finds no number: (0, 6, 8) viewed as (0, 6, -1, 4). Sizes that both begin with are the same
/// dimensions; the rest is to have as many elements as the rest. `to` where that leaves a choice.
std::vector<std::int64_t> complete_sizes(at::IntArrayRef from, at::IntArrayRef to);

/// `local`, or a contiguous copy if it cannot be viewed with `sizes`. For _unsafe_view, whose
/// result is no alias by contract. Composite operators call it on results in the memory order that
/// a kernel chose, and for a local tensor with a size of 1 that may be another order than for the
/// global one.
at::Tensor viewable(const at::Tensor& local, at::IntArrayRef sizes);

// Expanded tensors: along a dimension of stride 0 all positions share one element in memory.

/// Whether `tensor` has a dimension of stride 0 and more than one position.
bool has_stride_zero(const at::Tensor& tensor);
/// `tensor`, whose values are equal along dimensions where `strides` are 0, with one element in
/// memory for them.
at::Tensor expand_stride_zero(const at::Tensor& tensor, at::IntArrayRef strides);
/// The first position of `tensor` along dimensions where `strides` are 0.
at::Tensor narrow_stride_zero(at::Tensor tensor, at::IntArrayRef strides);
/// Copies `value` to `to`. Positions of `to` that share an element get one value.
void copy_to_stride_zero(const at::Tensor& to, const at::Tensor& value);

/// Throws Error if `impl`, a detached view, may not be written.
void check_writable(const DistributedTensorImpl& impl, std::string_view what);

/// Writes the values of `view`, a detached view, to its base, and so on if the base is a detached
/// view too. Collective: the base is gathered and sliced again.
void write_through(const at::Tensor& view);

}  // namespace tessera::detail
