// Shared by the callers of c10d, Gloo's and NCCL's: converts arguments to c10d's, and has the
// reduction that Gloo lacks.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// NCCL knows all of them, Gloo all but the average.
detail::GroupReduceOp to_c10d(ReduceOp op);

/// Counts of elements as counts of bytes.
std::vector<std::int64_t> counts_in_bytes(std::span<const std::int64_t> counts,
                                          std::size_t item_bytes);

/// The elements as bytes [numel * itemsize], sharing storage: for collectives that only move data.
at::Tensor as_bytes(const at::Tensor& contiguous);

/// `output` [n] = the reduction of the rows of `parts` [ranks, n] in rank order; 16-bit floats are
/// accumulated in fp32.
void reduce_rows(const at::Tensor& output, const at::Tensor& parts, ReduceOp op);

}  // namespace tessera::comm
TESSERA_API_END
