// The steps of a redistribution.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "rank/transfer.h"
#include "tessera/core/layout.h"
#include "tessera/core/redistribute_plan.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

// Index arithmetic. A step acts on one digit of one dimension. Whatever the tensor's dimensions
// are, the local tensor is viewed as three dimensions, (before, digit, after), or as five for a
// step that acts on two digits (all-to-all). Not collective.

/// The digit of a tensor dimension that a step acts on.
struct StepDigit {
  LayoutPtr layout;
  int dim;
  std::size_t digit;

  /// The digit of `dim` that `mesh_dim` splits.
  static StepDigit cut_by(LayoutPtr layout, int dim, int mesh_dim);
  /// The number of positions of the digit that this rank would have if `mesh_dims`, the digit's
  /// last ones, did not split it: the extent after an all-gather over them.
  std::int64_t gathered_extent(c10::IntArrayRef sizes, const DeviceMesh& mesh,
                               const std::vector<int>& mesh_dims) const;
};

/// The sizes (before, between..., after) of the view of a contiguous local tensor with `layout`,
/// without the extents of `digits` themselves. `digits` is sorted by `dim`.
std::vector<std::int64_t> extents_around(const std::vector<StepDigit>& digits, LayoutPtr layout,
                                         c10::IntArrayRef sizes, const DeviceMesh& mesh);

/// A contiguous range of a digit.
struct Chunk {
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

/// The chunks of `extent` positions that are split over `mesh_dims`, as nested torch.chunks, in the
/// order of the ranks of mesh.group(mesh_dims).
std::vector<Chunk> chunks_of(std::int64_t extent, const DeviceMesh& mesh,
                             const std::vector<int>& mesh_dims);

/// Whether all chunks except the last ones have the size of the first. Chunks that are padded to
/// that size then have their positions in order without gaps, up to the end.
bool only_last_are_short(const std::vector<Chunk>& chunks);

/// This rank's index in the process group mesh.group(mesh_dims).
std::size_t group_rank(const DeviceMesh& mesh, const std::vector<int>& mesh_dims);

/// The process group of a step that communicates.
comm::Communicator& group_of(const Step& step, const DeviceMesh& mesh);

/// A 1-D tensor of the elements in order, with lazy conjugation and negation resolved.
at::Tensor flat(const at::Tensor& tensor);
/// The tensor as a communicator's input: complex numbers as pairs of real ones.
at::Tensor reals(const at::Tensor& tensor);

// The steps of a redistribution on this rank's local tensor of a tensor with global `sizes`. They
// start collectives over group_of(step). Results are contiguous, with the elements in the right
// order; the caller reshapes them. Data is copied only if a collective needs it reordered or
// padded. Below autograd.

Started all_gather_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes);
Started reduce_scatter_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                            c10::IntArrayRef sizes);
Started all_reduce_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);
Started all_to_all_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes);
/// The step that cuts out this rank's part. Not collective. Shares memory with `local` if the part
/// is contiguous.
at::Tensor slice_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes);
/// The step that makes a tensor partial. Not collective. May return `local` itself.
at::Tensor make_partial_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);

}  // namespace tessera::detail
