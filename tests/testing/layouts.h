#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

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

/// A layout drawn from `engine`: any order of mesh dimensions on a tensor dimension, with local
/// digits in front of them or not, replicated mesh dimensions, and partial sums if asked for. Ranks
/// with equal engines draw the same.
inline LayoutPtr random_layout(std::mt19937& engine, const std::vector<std::int64_t>& mesh,
                               const std::vector<std::int64_t>& sizes, bool with_partial) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(engine() % n); };
  Layout::Dims dims;
  for (const std::int64_t size : sizes) {
    const bool several = size % 2 == 0 && size > 2 && below(3) == 0;
    dims.push_back(several ? std::vector<Digit>{{2, {}}, {size / 2, {}}}
                           : std::vector<Digit>{{0, {}}});
  }
  std::vector<int> order;
  for (int m = 0; m < static_cast<int>(mesh.size()); ++m) {
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(below(order.size() + 1)), m);
  }
  std::vector<PartialDim> partial;
  for (const int m : order) {
    const std::size_t dim = below(sizes.size() + (with_partial ? 2 : 1));
    if (dim < sizes.size()) {
      dims[dim][below(dims[dim].size())].mesh_dims.push_back(m);
    } else if (dim > sizes.size()) {
      partial.push_back({m, ReduceOp::kSum});
    }
  }
  return Layout::intern(mesh, std::move(dims), std::move(partial));
}

}  // namespace tessera::testing
