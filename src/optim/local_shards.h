// Local shards for optimizers and norms: their gradients, their state, and which shards are
// adjacent in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::optim {

/// The gradient of the persistent tensor in a slot; undefined if the parameter has no gradient. A
/// gradient whose layout differs from the layout of the parameter (a pending sum) is redistributed
/// and stored back, which is collective.
at::Tensor slot_gradient(const nn::ParameterSlot& slot);

/// Throws Error, on all ranks of a root mesh, if gradients that must be copies differ: see
/// nn::detail::check_copies(). Plain parameters count as copies on the largest root mesh. Each list
/// of parameters is compared once; with TESSERA_DEBUG=1, at each call. Does nothing if all
/// parameters are plain. With options.over, only marks the parameters as compared, because other
/// ranks may have other parameters. Collective over the root meshes of the distributed parameters.
void check_gradient_copies(const std::vector<nn::SlotPtr>& parameters, const char* what,
                           const NormOptions& options = {});

/// Whether `next` begins in memory where `first` ends. Both tensors must be contiguous.
bool adjoins(const at::Tensor& first, const at::Tensor& next);

/// A view of shape (numel) of the storage of `first`, from the first element of `first` on.
/// Autograd does not record the view.
at::Tensor flat_view(const at::Tensor& first, std::int64_t numel);

/// The elements of `tensors` in fewer tensors: consecutive tensors that are adjacent in memory,
/// such as the shards of an FSDP unit, become one tensor. Types and devices may be mixed.
std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors);

/// Multiplies the tensors in place by `factor`, a plain 0-d tensor on any device. The product is
/// rounded once; the factor is fp32, or fp64 for fp64 tensors.
void scale_by(const std::vector<at::Tensor>& tensors, const at::Tensor& factor);

/// The type in which a tensor of type `dtype` is updated: fp32 if `dtype` is narrower than fp32,
/// otherwise `dtype`.
c10::ScalarType update_type(c10::ScalarType dtype);

/// Zeros with the sizes and devices of `tensors`, and the types `dtypes` (one for each tensor).
/// Zeros of one type and device follow one another in one buffer, so that a kernel can update many
/// tensors as one. Each tensor begins at a multiple of 16 bytes, which vector accesses need.
std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors,
                                     const std::vector<c10::ScalarType>& dtypes);
/// Makes step counters of value 0 (0-d, fp32), one on the device of each of `tensors`, like
/// zeros_beside().
std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors);

/// Returns `state`, which has the sizes of the local tensor of `parameter`, as a tensor with the
/// layout of the parameter.
at::Tensor with_layout_of(const at::Tensor& parameter, const at::Tensor& state);

}  // namespace tessera::optim
TESSERA_API_FOR_TEST_END
