#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tensor/distributed_impl.h"
#include "tessera/dtensor/sharding_spec.h"

namespace tessera::detail {

// Conversions between a distributed tensor and its local one.

/// The impl of a tensor that a program says is distributed. Throws Error for one that is not.
const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor);

/// The checks of from_local. They read only this rank's tensor and send nothing.
void check_plain(const at::Tensor& local);
void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes);

/// Throws Error, on all ranks alike, unless the parts of a tensor of global `sizes` with the layout
/// `gradient` are of the sizes of those with `layout`, on every rank. `asked`: the function.
void check_gradient_parts(const char* asked, const Layout& layout, const Layout& gradient,
                          c10::IntArrayRef sizes);

/// `local`, or a contiguous copy where global strides in the order of the local ones would not be
/// true of it: of an expanded gradient, a slice, or where ranks could disagree on the order.
at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes);
/// A distributed tensor of global `sizes`, without autograd history, of a local one that
/// dense_local has returned. Shares memory and versions with it; its autograd state stays its own.
at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes);

}  // namespace tessera::detail
