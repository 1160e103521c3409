#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/core/layout_math.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

/// The local tensor of this rank, by index arithmetic alone. Over a partial mesh dimension
/// coordinate 0 holds the value and the others zeros.
inline at::Tensor local_part(const at::Tensor& full, const DeviceMesh& mesh, const Layout& layout) {
  at::Tensor part = full;
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    const auto indices = global_indices(layout, dim, full.size(dim), mesh.coordinate());
    part = part.index_select(dim, at::tensor(indices, at::kLong));
  }
  for (const PartialDim& partial : layout.partial()) {
    if (mesh.local_rank(partial.mesh_dim) != 0) {
      part = at::zeros_like(part);
    }
  }
  return part;
}

}  // namespace tessera::testing
