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

/// Returns the process group of all ranks for saves and loads. A mesh's groups may lack rank 0. The
/// first call is collective.
comm::CommunicatorPtr all_ranks(comm::World& world);

/// Returns a CPU process group of all ranks for sharded saves only. A background save can then run
/// while the program uses other groups. The first call is collective.
comm::CommunicatorPtr hosts_of_saves(comm::World& world);

/// Runs `work` on every rank. `work` must not communicate. If `work` fails on one rank, all ranks
/// throw the Error of that rank. Collective over `world`.
void run_or_fail_on_all(comm::World& world, const std::function<void()>& work);
/// Like run_or_fail_on_all() for a World, but for the ranks of the CPU process group `hosts`.
void run_or_fail_on_all(comm::Communicator& hosts, const std::function<void()>& work);

/// Like run_or_fail_on_all(), for work that reads a saved step. All ranks throw DamagedStep for
/// wrong checksums, or for a file that is missing on the failed rank and on rank 0. Other failures
/// throw Error.
void read_or_fail_on_all(comm::World& world, const std::function<void()>& work);

/// A function that gather_blocks() calls on rank 0 with a block of a global tensor. The block
/// begins at `offset`.
using BlockVisitor =
    std::function<void(std::span<const std::int64_t> offset, const at::Tensor& block)>;

/// Throws Error if the tensor is Partial, because a Partial tensor cannot be gathered. Not
/// collective.
void check_gatherable(const at::Tensor& tensor, const std::string& name);

/// Sends a plain or distributed tensor to world rank 0, as `dtype`. There, `visit` receives every
/// element exactly once, in blocks. `device`: the device of the sent blocks. `round_elements`:
/// roughly how many elements rank 0 receives at once. Collective, unless every rank has the whole
/// tensor.
void gather_blocks(const at::Tensor& tensor, c10::ScalarType dtype, comm::Communicator& world,
                   c10::DeviceType device, const BlockVisitor& visit,
                   std::int64_t round_elements = std::int64_t{64} << 20);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
