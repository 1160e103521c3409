#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/core/placement.h"

namespace tessera::comm {

/// `output` [n] = the reduction of the rows of `parts` [ranks, n] in rank order; 16-bit floats are
/// accumulated in fp32.
void reduce_rows(const at::Tensor& output, const at::Tensor& parts, ReduceOp op);

/// The elements as bytes [numel * itemsize], sharing storage: for collectives that only move data.
at::Tensor as_bytes(const at::Tensor& contiguous);

}  // namespace tessera::comm
