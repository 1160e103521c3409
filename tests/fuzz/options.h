#pragma once

#include "fuzz/case.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/ranks.h"

namespace tessera::fuzz {

/// The style of an entry of a case's plan.
tensor_parallel::StylePtr make_style(const StyleSpec& spec);

DeviceMesh make_mesh(const MeshSpec& spec, const testing::Rank& rank);
/// The dimensions of make_mesh() that split the batch.
DeviceMesh data_mesh(const MeshSpec& spec, const DeviceMesh& mesh);

fsdp::Options fsdp_options(const FsdpSpec& spec);

}  // namespace tessera::fuzz
