#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Rank 0 is given a block of the global tensor that begins at `offset`.
using BlockVisitor =
    std::function<void(std::span<const std::int64_t> offset, const at::Tensor& block)>;

/// Throws Error if a tensor cannot be gathered because it is partial. Not collective.
void check_gatherable(const at::Tensor& tensor, const std::string& name);

/// Brings a tensor, plain or distributed, to world rank 0, converted to `dtype`: there `visit` gets
/// every element in exactly one block, a bounded number of bytes at a time; no rank but 0 receives
/// anything, and replicas are sent once. Collective over `world`, whose tensors live on `device`,
/// unless rank 0 has all of it. A sub-mesh without rank 0 holds the same values as the one with it.
/// `round_elements`: what rank 0 receives at once, about, and at least a row of each rank.
void gather_blocks(const at::Tensor& tensor, c10::ScalarType dtype, comm::Communicator& world,
                   c10::DeviceType device, const BlockVisitor& visit,
                   std::int64_t round_elements = std::int64_t{64} << 20);

}  // namespace tessera::checkpoint
