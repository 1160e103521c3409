#pragma once

#include <ATen/core/Tensor.h>

#include "rank/transfer.h"
#include "tessera/core/redistribute_plan.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// The group of a step that communicates.
comm::Communicator& group_of(const Step& step, const DeviceMesh& mesh);

/// The elements in order, in one dimension, lazy conjugation and negation resolved.
at::Tensor flat(const at::Tensor& tensor);
/// What a communicator takes: complex numbers as pairs of real ones.
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
