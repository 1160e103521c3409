#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The global sizes of a tensor; `local` is this rank's part by `placements` on `mesh`. Each Shard
/// must name a dimension of `local`; none may be strided. If any is sharded, the ranks exchange the
/// sizes of their parts, between the hosts. Throws Error, on every rank, if the parts are not those
/// that torch.chunk makes; `what` names the caller. Collective, but not for meta tensors, whose
/// shards count as even.
std::vector<std::int64_t> agreed_sizes(const std::string& what, const at::Tensor& local,
                                       const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera::detail
TESSERA_API_END
