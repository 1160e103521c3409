#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

// The functions of this header make distributed tensors with global `sizes`, on the mesh's device
// or on the device in `options` (meta). Not collective. A Partial tensor reduces to the requested
// values. The results are leaves; set requires_grad in the options. Throws Error for a placement
// that the sizes do not permit.

/// Returns a distributed tensor with uninitialised elements.
DistributedTensor empty(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options = {});
/// Like empty(), with every element set to 0.
DistributedTensor zeros(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options = {});
/// Like empty(), with every element set to 1.
DistributedTensor ones(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options = {});
/// Like empty(), with every element set to `value`.
DistributedTensor full(std::vector<std::int64_t> sizes, const at::Scalar& value,
                       const DeviceMesh& mesh, const Placements& placements,
                       at::TensorOptions options = {});
/// Returns random numbers, uniform in [0, 1). The global tensor is bit-equal on every mesh; see
/// RandomKey.
DistributedTensor rand(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options = {});
/// Returns standard normal random numbers. Otherwise the same as rand().
DistributedTensor randn(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options = {});

}  // namespace tessera
TESSERA_API_END
