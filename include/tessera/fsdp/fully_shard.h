#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <optional>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// What is computed and communicated in which type. Sharded parameters, their gradients and the
/// optimizer keep the type the parameter was made with.
struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype;   ///< of all-gathers and computation
  std::optional<c10::ScalarType> reduce_dtype;  ///< of gradient reduction; default: param_dtype
  std::optional<c10::ScalarType> output_dtype;  ///< forward's floating-point results are cast to it
  bool cast_forward_inputs = true;  ///< floating-point arguments are cast to param_dtype
};

struct Options {
  MixedPrecisionPolicy mp_policy;
  /// Free the gathered parameters after forward and gather them again in backward (ZeRO-3). Default:
  /// true for every unit but the root.
  std::optional<bool> reshard_after_forward;
};

/// Makes `module` one FSDP unit: its parameters, and those below it that belong to no unit yet, are
/// split on dimension 0 over the 1-D `mesh` (a dimension of a larger mesh: parameters that
/// tensor parallelism has already put on another dimension of it become 2-D). They are gathered
/// together before forward and before backward and freed after; their gradients are reduce-scattered
/// together, averaged over `mesh`. Apply bottom-up: blocks first, the root last; the call on the
/// root must be the forward. Parameters may be on the meta device.
///
/// Not collective. Forward and backward of a unit are collective over `mesh`.
/// Throws Error for a mesh that is not 1-D, a module wrapped already, or a parameter without
/// dimensions.
void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});

/// Whether fully_shard was applied to exactly this module.
bool is_fully_sharded(const nn::ModuleBase& module);

/// Gathers or frees a unit's parameters by hand (not those of units below it).
void unshard(nn::ModuleBase& module);
void reshard(nn::ModuleBase& module);

}  // namespace tessera::fsdp
