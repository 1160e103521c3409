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

// Functions for styles, those of a program as well.

/// `tensor`, from a call of `module`, as a distributed tensor with placement `desired` on the 1-D
/// `mesh`. `layout`: the placement of a plain tensor. With Replicate it is the same on every rank,
/// otherwise it is this rank's part of a tensor of global sizes `sizes` (default: the ranks
/// exchange the sizes of their parts). `regather`: as the option of the styles. Collective if data
/// or sizes are sent. Differentiable. Throws Error if `tensor` is undefined or on another mesh, and
/// on all ranks if the parts are not shards of one tensor.
at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes = {},
                         bool regather = false);

/// The distributed `tensor` redistributed to `layout`, or with `use_local_output` its local tensor.
/// Collective if data is sent. Differentiable.
at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout, bool use_local_output);

/// Whether a module is an nn::Linear, or a Linear of libtorch in or inside of an nn::Hooked. It has
/// a `weight`, and maybe a `bias`.
bool is_linear(const nn::ModuleBase& module);
/// The same for Embedding. It has a `weight`.
bool is_embedding(const nn::ModuleBase& module);

/// Adds the two matrices of a LoRA adapter (nn::apply_lora) to `placements`, if `linear` has one.
void place_adapter(const nn::ModuleBase& linear, const Placement& a, const Placement& b,
                   std::vector<std::pair<nn::SlotPtr, Placement>>& placements);

/// Throws Error unless `features` are `heads` heads of equal size and the ranks of `mesh` divide
/// the heads. 0 heads: no check.
void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh);

/// Throws Error: `style` does not fit `module`. `fits`: the classes that it fits.
[[noreturn]] void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module,
                             const char* fits);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
