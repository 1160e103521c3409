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

// Functions for implementing parallel styles, including a program's own.

/// Returns `tensor`, from a call of `module`, as a distributed tensor with placement `desired` on
/// the 1-D `mesh`. `layout`: the placement of a plain tensor. With Replicate the plain tensor is
/// the same on every rank; otherwise it is this rank's part of a tensor with global sizes `sizes`
/// (default: the ranks exchange the sizes of their parts). `regather`: see the option of the
/// styles. Collective if data or sizes are sent. Differentiable. Throws Error if `tensor` is
/// undefined or on another mesh, and on all ranks if the parts are not shards of one tensor.
at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes = {},
                         bool regather = false);

/// Redistributes `tensor`, which is distributed, to `layout`. With `use_local_output` returns the
/// local tensor. Collective if data is sent. Differentiable.
at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout, bool use_local_output);

/// Whether a module is an nn::Linear, or a libtorch Linear wrapped by or inside an nn::Hooked. It
/// has a `weight`, and possibly a `bias`.
bool is_linear(const nn::ModuleBase& module);
/// Whether a module is an nn::Embedding, or a libtorch Embedding wrapped by or inside an
/// nn::Hooked. It has a `weight`.
bool is_embedding(const nn::ModuleBase& module);

/// If `linear` has a LoRA adapter (nn::apply_lora), adds its two matrices to `placements`, with the
/// placements `a` and `b`.
void place_adapter(const nn::ModuleBase& linear, const Placement& a, const Placement& b,
                   std::vector<std::pair<nn::SlotPtr, Placement>>& placements);

/// Throws Error unless `features` can be split into `heads` heads of equal size and the ranks of
/// `mesh` divide the heads. 0 heads: no check.
void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh);

/// Throws the Error that `style` is not applicable to `module`. `fits`: the classes that it is
/// applicable to.
[[noreturn]] void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module,
                             const char* fits);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
