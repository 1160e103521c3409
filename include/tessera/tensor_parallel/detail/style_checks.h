#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/styles.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// Whether a module is an nn::Linear, or a libtorch Linear that is wrapped by an nn::Hooked or
/// inside an nn::Hooked. Such a module has a `weight`, and possibly a `bias`.
bool is_linear(const nn::ModuleBase& module);
/// Whether a module is an nn::Embedding, or a libtorch Embedding that is wrapped by an nn::Hooked
/// or inside an nn::Hooked. Such a module has a `weight`.
bool is_embedding(const nn::ModuleBase& module);

/// If `linear` has a LoRA adapter (nn::apply_lora), adds its two matrices to `placements`, with the
/// placements `a` and `b`.
void place_adapter(const nn::ModuleBase& linear, const Placement& a, const Placement& b,
                   std::vector<std::pair<nn::SlotPtr, Placement>>& placements);

/// Throws Error unless `features` can be split into `heads` heads of equal size and the ranks of
/// `mesh` divide the heads. If `heads` is 0, does nothing.
void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh);

/// Throws the Error that `style` is not applicable to `module`. `fits` names the classes to which
/// `style` is applicable.
[[noreturn]] void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module,
                             const char* fits);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
