// The steps of a redistribution.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "rank/transfer.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/redistribute_plan.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// The process group over which a step communicates.
comm::Communicator& group_of(const Step& step, const DeviceMesh& mesh);

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
/// Cuts this rank's part out of the local tensor, without a copy if the part is contiguous. Not
/// collective.
at::Tensor slice_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes);
/// The step that makes a tensor partial. Not collective. May return `local` itself.
at::Tensor make_partial_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);

}  // namespace tessera::detail
