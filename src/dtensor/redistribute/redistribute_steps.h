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

/// The group of a step that communicates.
comm::Communicator& group_of(const Step& step, const DeviceMesh& mesh);

/// The elements in order, in one dimension, lazy conjugation and negation resolved.
at::Tensor flat(const at::Tensor& tensor);
/// The input of a communicator: complex numbers as pairs of real ones.
at::Tensor reals(const at::Tensor& tensor);

// The steps of a redistribution on this rank's local tensor of a tensor of global `sizes`.
// Collectives are started, over group_of(step). Results are contiguous, with the right elements in
// the right order; the caller gives them their shape. Data is copied only where a collective needs
// it in another order or padded. Below autograd.

Started all_gather_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes);
Started reduce_scatter_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                            c10::IntArrayRef sizes);
Started all_reduce_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);
Started all_to_all_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                        c10::IntArrayRef sizes);
/// Not collective. Shares memory with `local` where the slice is contiguous.
at::Tensor slice_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes);
/// Not collective. May return `local` itself.
at::Tensor make_partial_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);

}  // namespace tessera::detail
