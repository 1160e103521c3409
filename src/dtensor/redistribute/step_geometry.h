#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

// A step of a redistribution acts on one digit of one dimension. Whatever the tensor's dimensions
// are, its local tensor is then viewed as one of three dimensions, (before, digit, after), or of
// five where a step acts on two digits (all-to-all). Nothing here is collective.

/// The digit of a tensor dimension that a step acts on.
struct StepDigit {
  LayoutPtr layout;
  int dim;
  std::size_t digit;

  /// The digit of `dim` that `mesh_dim` cuts.
  static StepDigit cut_by(LayoutPtr layout, int dim, int mesh_dim);
  /// How many positions of the digit this rank would hold if `mesh_dims`, its last ones, did not
  /// cut it: what an all-gather over them gives.
  std::int64_t gathered_extent(c10::IntArrayRef sizes, const DeviceMesh& mesh,
                               const std::vector<int>& mesh_dims) const;
};

/// The sizes (before, between..., after) of that view for a contiguous local tensor under `layout`,
/// without those of `digits` themselves. `digits` is ordered by `dim`.
std::vector<std::int64_t> extents_around(const std::vector<StepDigit>& digits, LayoutPtr layout,
                                         c10::IntArrayRef sizes, const DeviceMesh& mesh);

/// A contiguous range of a digit.
struct Chunk {
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

/// The chunks of `extent` positions cut over `mesh_dims`, as nested torch.chunks, in the order of
/// the ranks of mesh.group(mesh_dims).
std::vector<Chunk> chunks_of(std::int64_t extent, const DeviceMesh& mesh,
                             const std::vector<int>& mesh_dims);

/// Whether all chunks have the size of the first one, except for the last ones. Chunks that are
/// padded to that size then have their positions in order without gaps, up to the end.
bool only_last_are_short(const std::vector<Chunk>& chunks);

/// This rank's rank in mesh.group(mesh_dims).
std::size_t group_rank(const DeviceMesh& mesh, const std::vector<int>& mesh_dims);

}  // namespace tessera::detail
