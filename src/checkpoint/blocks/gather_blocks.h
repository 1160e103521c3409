// How an export brings a sharded tensor to the rank that writes it, without a full copy anywhere.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Called on rank 0 with a block of the global tensor that begins at `offset`.
using BlockVisitor =
    std::function<void(std::span<const std::int64_t> offset, const at::Tensor& block)>;

/// Throws Error if a tensor cannot be gathered because it is partial. Not collective.
void check_gatherable(const at::Tensor& tensor, const std::string& name);

/// Sends a tensor, plain or distributed, to world rank 0, converted to `dtype`. There `visit` gets
/// every element in exactly one block, a bounded number of bytes at a time. No other rank receives
/// anything, and only one of several replicas is sent. Collective over `world`, whose tensors are
/// on `device`, unless rank 0 has the whole tensor. A submesh without rank 0 must hold the same
/// values as the one with it. `round_elements`: about as many elements as rank 0 receives at once,
/// but at least a row of each rank.
void gather_blocks(const at::Tensor& tensor, c10::ScalarType dtype, comm::Communicator& world,
                   c10::DeviceType device, const BlockVisitor& visit,
                   std::int64_t round_elements = std::int64_t{64} << 20);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
