#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// For your own parallel styles: returns `tensor`, from a call of `module`, as a distributed tensor
/// with placement `desired` on the 1-D `mesh`. `layout`: the placement of a plain tensor. With
/// Replicate the plain tensor is the same on every rank; otherwise it is this rank's part of a
/// tensor with global sizes `sizes` (default: the ranks exchange the sizes of their parts).
/// `regather`: as the option of the styles in styles.h. Collective if data or sizes are sent.
/// Differentiable. Throws Error if `tensor` is undefined or on another mesh, and on all ranks if
/// the parts are not shards of one tensor.
at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes = {},
                         bool regather = false);

/// For your own parallel styles: redistributes the distributed `tensor` to `layout`. If
/// `use_local_output` is true, returns the local tensor. Collective if data is sent.
/// Differentiable.
at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout, bool use_local_output);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
