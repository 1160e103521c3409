// What all ranks of a world do together: run work that may fail, and send tensors to rank 0.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::checkpoint {

/// The group of all ranks. The world may be larger than the meshes of a model: it connects all
/// ranks that save or load with rank 0. Collective at the first call.
comm::CommunicatorPtr all_ranks(comm::World& world);

/// The same between the hosts, for sharded saves only: a save in the background uses it while the
/// program uses all other groups.
comm::CommunicatorPtr hosts_of_saves(comm::World& world);

/// Runs `work`, which must not communicate, on every rank. If it throws on one, all ranks throw an
/// Error with that rank's message, so that none waits for a peer that has failed. Collective over
/// `world`.
void run_or_fail_on_all(comm::World& world, const std::function<void()>& work);
/// The same over a group between hosts.
void run_or_fail_on_all(comm::Communicator& hosts, const std::function<void()>& work);

/// The same for reading the files of a step: all ranks throw DamagedStep if bytes are not those
/// that were written, or a file is not there for rank 0 either. A file that could not be read
/// proves nothing: that is an Error.
void read_or_fail_on_all(comm::World& world, const std::function<void()>& work);

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
