// Local shards for optimizers and norms: their gradients, their state, and which of them adjoin in
// memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::optim {

/// The gradient of a slot's persistent tensor; undefined if there is none. One whose layout differs
/// from the parameter's (a pending sum) is redistributed and put back, which is collective.
at::Tensor slot_gradient(const nn::ParameterSlot& slot);

/// Throws Error, on all ranks of a root mesh, if gradients that must be copies differ: see
/// nn::detail::check_copies(). Plain parameters count as copies on the largest root mesh. Compares
/// a list of parameters once; with TESSERA_DEBUG=1, at each call. Does nothing if all parameters
/// are plain. With options.over only marks them as compared: other ranks may have other parameters.
/// Collective over the root meshes of the distributed parameters.
void check_gradient_copies(const std::vector<nn::SlotPtr>& parameters, const char* what,
                           const NormOptions& options = {});

/// Whether contiguous `next` begins in memory where contiguous `first` ends.
bool adjoins(const at::Tensor& first, const at::Tensor& next);

/// The `numel` elements of the storage of `first` that begin where it begins: (numel), below
/// autograd.
at::Tensor flat_view(const at::Tensor& first, std::int64_t numel);

/// The same elements in fewer tensors: consecutive tensors that adjoin in memory, as FSDP lays out
/// the shards of a unit, become one. Types and devices may be mixed.
std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors);

/// Multiplies the tensors in place by `factor`, plain and 0-d on any device. The product is rounded
/// once; the factor is fp32 for all types but fp64.
void scale_by(const std::vector<at::Tensor>& tensors, const at::Tensor& factor);

/// The type in which a tensor of type `dtype` is updated: fp32 where it is narrower.
c10::ScalarType update_type(c10::ScalarType dtype);

/// Zeros of the sizes and on the devices of `tensors`, of the types at their places in `dtypes`.
/// Those of one type and device adjoin in one buffer, so that a kernel can update many as one.
std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors,
                                     const std::vector<c10::ScalarType>& dtypes);
/// The same for 0-d fp32 counters.
std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors);

/// `state`, of the sizes of the local tensor of `parameter`, as a tensor of the parameter's layout.
at::Tensor with_layout_of(const at::Tensor& parameter, const at::Tensor& state);

}  // namespace tessera::optim
TESSERA_API_FOR_TEST_END
