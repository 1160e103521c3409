#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::nn {

/// Each of `parts`, of equal sizes and one type, is this rank's head and tail chunk along `dim`:
/// returns the whole of each, in the order of the sequence. Collective over the 1-D `mesh`, one
/// all-gather for all. Gradient: the sum over the ranks, one reduce-scatter; differentiable once.
/// `purpose`: what both are for, a literal, for traces and for messages.
std::vector<at::Tensor> gather_sequence(const std::vector<at::Tensor>& parts, std::int64_t dim,
                                        const DeviceMesh& mesh, const char* purpose);

}  // namespace tessera::nn
