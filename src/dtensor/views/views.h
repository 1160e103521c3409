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

/// Appends a note to libtorch's error message: sizes are global. Programs often pass local sizes.
void add_global_sizes(c10::Error& error, const at::Tensor& tensor);

/// Returns the global strides of each result of a view operator, or nullopt without a meta kernel.
/// Runs the operator on meta tensors. An exception is thrown on all ranks alike.
std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

/// Returns `local`, or a contiguous copy if `local` cannot be viewed with `sizes`. Used for
/// _unsafe_view. With a dimension of local size 1, the local stride order can differ from the
/// global order.
at::Tensor viewable(const at::Tensor& local, at::IntArrayRef sizes);

// Functions for expanded tensors: along a dimension of stride 0, all positions share one element.

/// Whether a dimension of size 2 or more has stride 0.
bool has_stride_zero(const at::Tensor& tensor);
/// Returns `tensor` with stride 0 in each dimension where `strides` has a 0. All values along such
/// a dimension must be equal.
at::Tensor expand_stride_zero(const at::Tensor& tensor, at::IntArrayRef strides);
/// Selects the first position along each dimension for which `strides` is 0.
at::Tensor narrow_stride_zero(at::Tensor tensor, at::IntArrayRef strides);
/// Copies `value` to `to`. `value` must be equal at positions that share one element in `to`.
void copy_to_stride_zero(const at::Tensor& to, const at::Tensor& value);

/// Throws Error if `impl` is a detached view (own copy of elements) that cannot be written.
void check_writable(const DistributedTensorImpl& impl, std::string_view what);

/// Writes the values of the detached view `view` to its base, and if the base is a detached view
/// too, to the base's base. Collective: gathers the base.
void write_through(const at::Tensor& view);

}  // namespace tessera::detail
