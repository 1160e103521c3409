#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"

namespace tessera {

/// Distributed tensors of global `sizes`, each rank making its own part: no communication. The
/// device is the mesh's, unless `options` name one (meta). Where placements say Partial, the parts
/// reduce to the values asked for. Throws Error for a placement that does not fit the sizes.
/// Gradient: leaves; set requires_grad in the options.
DistributedTensor empty(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options = {});
DistributedTensor zeros(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options = {});
DistributedTensor ones(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options = {});
DistributedTensor full(std::vector<std::int64_t> sizes, const at::Scalar& value,
                       const DeviceMesh& mesh, const Placements& placements,
                       at::TensorOptions options = {});
/// start, start + step, ... below end. int64 unless `options` name a type.
DistributedTensor arange(std::int64_t start, std::int64_t end, std::int64_t step,
                         const DeviceMesh& mesh, const Placements& placements,
                         at::TensorOptions options = {});
/// Uniform in [0, 1) and standard normal, the same global tensor on every mesh (see random.h).
DistributedTensor rand(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options = {});
DistributedTensor randn(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options = {});

}  // namespace tessera
