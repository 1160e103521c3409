// Functions for views of distributed tensors.
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

/// Adds to an error message that sizes are global, because programs often pass a rank's own sizes.
void add_global_sizes(c10::Error& error, const at::Tensor& tensor);

/// Returns the global strides of the results of a view operator, one entry per tensor (also for
/// each tensor in a list). Runs the operator on meta tensors. Local strides do not suffice: a
/// dimension of local size 1 can have any stride, so ranks could disagree. Throws the operator's
/// exceptions, on every rank. nullopt if the operator does not run on meta tensors.
std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

/// Returns `local`, or a contiguous copy if `local` cannot be viewed with `sizes`. Used for
/// _unsafe_view, whose result need not be an alias. A composite operator calls _unsafe_view on a
/// kernel's result. If a local dimension has size 1, the kernel's memory order can differ from that
/// of the global tensor.
at::Tensor viewable(const at::Tensor& local, at::IntArrayRef sizes);

// Functions for expanded tensors. All positions along a dimension of stride 0 share one element:

/// Whether `tensor` has a dimension of stride 0 and more than one position.
bool has_stride_zero(const at::Tensor& tensor);
/// Returns `tensor` with only one element in memory along each dimension where `strides` are 0. All
/// values along such a dimension must be equal.
at::Tensor expand_stride_zero(const at::Tensor& tensor, at::IntArrayRef strides);
/// Narrows `tensor` to its first position along each dimension where `strides` are 0.
at::Tensor narrow_stride_zero(at::Tensor tensor, at::IntArrayRef strides);
/// Copies `value` to `to`. Positions of `to` that share one element must get the same value.
void copy_to_stride_zero(const at::Tensor& to, const at::Tensor& value);

/// Throws Error if the detached view `impl` (with its own copy of elements) must not be written.
void check_writable(const DistributedTensorImpl& impl, std::string_view what);

/// Writes the values of `view`, which has its own copy of elements, to the view's base. If the base
/// also is such a view, writes to the base's base. Collective: gathers and shards the base.
void write_through(const at::Tensor& view);

}  // namespace tessera::detail
