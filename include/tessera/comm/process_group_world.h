#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Makes a World of the ranks of a c10d process group, with the same rank numbers. `Group`:
/// libtorch's ProcessGroup or one of its back ends. The World can outlive the group. For an NCCL
/// group, `options.device` must be "cuda". Collective over the group. Throws the errors of
/// world_from_broadcast and of the process group.
///   const comm::WorldPtr world = comm::world_from_process_group(*group);
template <class Group>
WorldPtr world_from_process_group(Group& group, const WorldOptions& options = {}) {
  const auto broadcast = [&](void* bytes, std::size_t count) {
    const at::Tensor text = at::from_blob(bytes, {static_cast<std::int64_t>(count)}, at::kByte);
    std::vector<at::Tensor> sent{text.to(c10::Device(options.device))};
    group.broadcast(sent)->wait();
    text.copy_(sent.front());
  };
  return world_from_broadcast(group.getRank(), group.getSize(), broadcast, options);
}

}  // namespace tessera::comm
TESSERA_API_END
