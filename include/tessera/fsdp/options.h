#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// The dtypes for computation and communication. Sharded parameters, their gradients and the
/// optimizer state keep the parameter's own dtype.
struct MixedPrecisionPolicy {
  /// The dtype of all-gathers and computation; default: the parameter's dtype.
  std::optional<c10::ScalarType> param_dtype{};
  /// The dtype in which gradients are reduced; default: param_dtype.
  std::optional<c10::ScalarType> reduce_dtype{};
  /// The dtype to which floating-point results of forward are cast; default: results are not cast.
  std::optional<c10::ScalarType> output_dtype{};
  bool cast_forward_inputs = true;  ///< whether to cast floating-point arguments to param_dtype
  /// Whether results of forward get the dtype of the first floating-point argument, if output_dtype
  /// is not set.
  bool restore_input_dtype = false;
};

// fully_shard calls a PlacementFunction or MeshFunction of Options once for each parameter, which
// may be on the meta device. The function must return the same on every rank.

/// Returns how to place a parameter on the shard dimension of the mesh: Shard(d), or Replicate().
/// nullopt means Shard(0). `name`: the parameter's name within the unit.
///   options.shard_placement = [](const std::string& name, const at::Tensor& parameter) {
///     return name.ends_with("bias") ? std::optional<Placement>(Replicate{})
///                                   : std::optional<Placement>(Shard{parameter.dim() - 1});
///   };
using PlacementFunction =
    std::function<std::optional<Placement>(const std::string& name, const at::Tensor& parameter)>;

/// Returns the mesh of a parameter; nullopt means the unit's mesh. `name`: the parameter's name
/// within the unit. fully_shard must accept the mesh.
using MeshFunction =
    std::function<std::optional<DeviceMesh>(const std::string& name, const at::Tensor& parameter)>;

/// OffloadPolicy: FSDP stores shards, their gradients and the optimizer state in CPU memory.
/// Parameters are gathered on the mesh's device.
struct OffloadPolicy {
  /// Whether to use page-locked memory if there is a CUDA device, so that copies overlap
  /// computation.
  bool pin_memory = true;
};

/// How an FSDP unit is sharded, gathered and reduced.
struct Options {
  MixedPrecisionPolicy mp_policy{};
  /// Whether and how shards are stored in CPU memory. Default: shards are stored on the mesh's
  /// device.
  std::optional<OffloadPolicy> offload_policy{};
  /// Whether forward frees the gathered parameters at its end, and backward gathers again (ZeRO-3).
  /// False is ZeRO-2. The default is true, except for a root unit without a post_forward_mesh_size.
  std::optional<bool> reshard_after_forward{};
  /// If n > 1, n neighbouring ranks together keep a copy of the parameters after forward (hpZ of
  /// ZeRO++). Backward then gathers among these ranks only. n must divide the number of ranks in
  /// the shard dimension.
  std::int64_t post_forward_mesh_size = 1;
  PlacementFunction shard_placement{};
  /// Chooses a mesh for single parameters, such as experts. FSDP gathers and reduces these
  /// parameters over the chosen mesh. Gradients are still divided by the number of ranks of the
  /// root's mesh.
  MeshFunction parameter_mesh{};
  /// Parameters and buffers that FSDP leaves unchanged: not moved, sharded, gathered, cast or
  /// reduced. Must list each trainable parameter of the model that is intentionally in no unit.
  std::unordered_set<nn::SlotPtr> ignored{};
  /// Size in MiB of the buckets in which replicate() all-reduces gradients, as in DDP; the first
  /// bucket has 1 MiB. HSDP with one rank of shards uses buckets, too. A bucket can be reduced
  /// during backward, so backward must not call other collectives of the process group.
  std::int64_t bucket_cap_mb = 25;
};

}  // namespace tessera::fsdp
TESSERA_API_END
