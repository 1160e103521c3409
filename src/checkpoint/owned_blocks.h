#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/core/layout_math.h"

namespace tessera::checkpoint {

/// What this rank has of a tensor, plain (all of it) or distributed.
std::vector<Box> owned_blocks(const at::Tensor& tensor);
/// The part of a local tensor that a box describes: a view.
at::Tensor local_block(const at::Tensor& local, const Box& box);

}  // namespace tessera::checkpoint
