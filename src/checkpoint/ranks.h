// Operations of all ranks of a world: run work that can fail, and send tensors to rank 0.

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

/// Returns the process group of all ranks. Saves and loads communicate with rank 0 over this group,
/// because a mesh need not contain rank 0. The first call is collective.
comm::CommunicatorPtr all_ranks(comm::World& world);

/// Returns a CPU process group of all ranks, used only by sharded saves: a background save uses
/// this group while the program uses the other groups. The first call is collective.
comm::CommunicatorPtr hosts_of_saves(comm::World& world);

/// Runs `work`, which must not communicate, on every rank. If `work` throws on one rank, all ranks
/// throw an Error with the message of that rank, so that no rank waits for a failed peer.
/// Collective over `world`.
void run_or_fail_on_all(comm::World& world, const std::function<void()>& work);
/// Like run_or_fail_on_all() for a World, but for the ranks of the CPU process group `hosts`.
void run_or_fail_on_all(comm::Communicator& hosts, const std::function<void()>& work);

/// Like run_or_fail_on_all(), for work that reads the files of a saved step. All ranks throw
/// DamagedStep if bytes do not match their checksums, or if a file is missing both for the rank
/// that failed and for rank 0. All ranks throw a plain Error if a file exists but cannot be read.
void read_or_fail_on_all(comm::World& world, const std::function<void()>& work);

/// A function that gather_blocks() calls on rank 0 with a block of a global tensor. The block
/// begins at `offset`.
using BlockVisitor =
    std::function<void(std::span<const std::int64_t> offset, const at::Tensor& block)>;

/// Throws Error if the tensor is Partial, because a Partial tensor cannot be gathered. Not
/// collective.
void check_gatherable(const at::Tensor& tensor, const std::string& name);

/// Sends a plain or distributed tensor to world rank 0, converted to `dtype`. On rank 0, `visit`
/// receives every element exactly once, in blocks of bounded size. If several ranks have the same
/// shard, one of them sends the shard. If the mesh is a slice of a larger mesh, all slices must
/// have equal values. Collective over `world`, unless every rank has the whole tensor. `device`:
/// tensors are moved to `device` before they are sent. `round_elements`: approximate number of
/// elements that rank 0 receives at once.
void gather_blocks(const at::Tensor& tensor, c10::ScalarType dtype, comm::Communicator& world,
                   c10::DeviceType device, const BlockVisitor& visit,
                   std::int64_t round_elements = std::int64_t{64} << 20);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
