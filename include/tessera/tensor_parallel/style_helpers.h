#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

// What the styles have in common, for those of a program as well.

/// `tensor`, of a call of `module`, as a distributed tensor with placement `desired` on the 1-D
/// `mesh`. A plain tensor is the same on every rank if `layout` is Replicate; else it is this
/// rank's part of one with that placement and global sizes `sizes` (default: the sum of the ranks'
/// parts, which they exchange). With `regather`, gathers by gather_again_in_backward(). Collective
/// if data must move, or sizes be exchanged; differentiable. Throws Error if `tensor` is undefined
/// or on another mesh, on all ranks if their parts are not shards of one tensor.
at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes = {},
                         bool regather = false);

/// The distributed `tensor` redistributed to placement `layout`; its local tensor if
/// `use_local_output`. Collective if data must move; differentiable.
at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout, bool use_local_output);

/// Whether a module is nn's Linear, or libtorch's, in nn::Hooked or inside of what one holds; each
/// has a `weight` and maybe a `bias`.
bool is_linear(const nn::ModuleBase& module);
/// The same of an Embedding, which has a `weight`.
bool is_embedding(const nn::ModuleBase& module);

/// Adds to `placements` the matrices of a Linear's adapter (nn::apply_lora), if it has one.
void place_adapter(const nn::ModuleBase& linear, const Placement& a, const Placement& b,
                   std::vector<std::pair<nn::SlotPtr, Placement>>& placements);

/// Throws Error unless `features` are `heads` heads of equal size, the same number of them for each
/// rank of `mesh`. 0 heads: no check.
void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh);

/// Throws Error: `style` does not fit `module`; `fits`: the modules that it is for.
[[noreturn]] void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module,
                             const char* fits);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
