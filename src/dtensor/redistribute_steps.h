#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/core/redistribute_plan.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// The steps of a redistribution on this rank's part of a tensor of global `sizes`. Results are
/// contiguous, with the right number of elements in the right order; the caller gives them their
/// shape. Copies are made only where a collective needs its data in another order or padded.
at::Tensor all_gather_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                           c10::IntArrayRef sizes);
at::Tensor reduce_scatter_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                               c10::IntArrayRef sizes);
at::Tensor all_reduce_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);
at::Tensor all_to_all_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                           c10::IntArrayRef sizes);
/// Not collective. Shares memory with `local` where the slice is contiguous.
at::Tensor slice_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh,
                      c10::IntArrayRef sizes);
/// Not collective. May return `local` itself.
at::Tensor make_partial_step(const Step& step, const at::Tensor& local, const DeviceMesh& mesh);

}  // namespace tessera::detail
