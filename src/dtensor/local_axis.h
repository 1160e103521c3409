#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// One digit of one dimension, as `layout` splits it: what a step of a redistribution acts on.
struct Axis {
  LayoutPtr layout;
  int dim;
  std::size_t digit;

  /// The digit of `dim` that mesh dimension `mesh_dim` splits.
  static Axis split_by(LayoutPtr layout, int dim, int mesh_dim);
  /// What this rank would hold of the digit if `mesh_dims`, its last ones, did not split it.
  std::int64_t whole_extent(c10::IntArrayRef sizes, const DeviceMesh& mesh,
                            const std::vector<int>& mesh_dims) const;
};

/// A contiguous local tensor under `layout` seen as (before, axis 0, between, axis 1, after), with
/// all axes left out: the products of the local extents around them. `axes` is ordered by `dim`.
/// Whatever the tensor's dimensions are, a step then acts on a tensor of three or five.
std::vector<std::int64_t> extents_around(const std::vector<Axis>& axes, LayoutPtr layout,
                                         c10::IntArrayRef sizes, const DeviceMesh& mesh);

/// A contiguous range of an axis.
struct Piece {
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

/// The pieces of an axis of `extent` split over `mesh_dims`, level by level as torch.chunk does, in
/// the order of the ranks of mesh.group(mesh_dims).
std::vector<Piece> pieces_of(std::int64_t extent, const DeviceMesh& mesh,
                             const std::vector<int>& mesh_dims);

/// Whether all pieces have the first one's size, but for a shorter tail: laid side by side with
/// that size each, they then need no gaps closed.
bool only_tail_is_short(const std::vector<Piece>& pieces);

/// This rank's number in mesh.group(mesh_dims).
std::size_t group_rank(const DeviceMesh& mesh, const std::vector<int>& mesh_dims);

}  // namespace tessera::detail
