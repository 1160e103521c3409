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
  /// Whether results of forward are cast to the dtype of the first floating-point argument, if
  /// output_dtype is not set. Useful for a unit with another dtype than the rest of the model (a
  /// norm in fp32).
  bool restore_input_dtype = false;
};

// fully_shard calls a PlacementFunction or MeshFunction of Options once for each parameter, which
// may be on the meta device. The function must return the same on every rank.

/// Returns the placement of a parameter on the shard dimension of the mesh: Shard(d) for any
/// dimension d, or Replicate(); nullopt means Shard(0). `name`: the parameter's name within the
/// unit.
///   options.shard_placement = [](const std::string& name, const at::Tensor& parameter) {
///     return name.ends_with("bias") ? std::optional<Placement>(Replicate{})
///                                   : std::optional<Placement>(Shard{parameter.dim() - 1});
///   };
using PlacementFunction =
    std::function<std::optional<Placement>(const std::string& name, const at::Tensor& parameter)>;

/// Returns the mesh of a parameter (of an expert, for example); nullopt means the unit's mesh.
/// `name`: the parameter's name within the unit. The mesh must meet the conditions for `mesh` of
/// fully_shard.
///   options.parameter_mesh = [mesh](const std::string& name, const at::Tensor&) {
///     return name.starts_with("head") ? std::optional(mesh) : std::nullopt;
///   };
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
  /// True: free the gathered parameters after forward and gather again in backward (ZeRO-3). False:
  /// keep the parameters gathered between forward and backward (ZeRO-2). Default: true, except for
  /// a root unit without a post_forward_mesh_size.
  std::optional<bool> reshard_after_forward{};
  /// If n > 1, each of n neighbouring ranks stores 1/n of the gathered parameters after forward.
  /// Backward then gathers among these ranks only (hpZ of ZeRO++; FSDP2's reshard_after_forward=n).
  /// n must divide the number of ranks in the shard dimension of the mesh. If n is 1 or equals this
  /// number of ranks, a rank stores only its shards.
  std::int64_t post_forward_mesh_size = 1;
  PlacementFunction shard_placement{};
  /// Chooses a mesh for single parameters, which are then gathered and reduced over this mesh. If
  /// this mesh is a part of the unit's mesh, other parts have other parameters (experts, for
  /// example), and gradient norms include all parts. Summed gradients are divided by the number of
  /// ranks of the root's mesh, because the loss is the mean over these ranks.
  MeshFunction parameter_mesh{};
  /// Parameters and buffers that FSDP leaves unchanged: not moved, sharded, gathered, cast or
  /// reduced. Must list each trainable parameter of the model that is intentionally in no unit.
  std::unordered_set<nn::SlotPtr> ignored{};
  /// For replicate, and for HSDP with one rank in the shard dimension: gradients are all-reduced in
  /// buckets of about bucket_cap_mb MiB (as in DDP). The first bucket has only 1 MiB: the gradients
  /// of the last parameters, which are complete first. A bucket is reduced while backward still
  /// computes the gradients of earlier parameters, if the whole model is one unit without parameter
  /// hooks and no other FSDP model takes part in the same backward. The program must then not call
  /// collectives of the same process group in backward.
  std::int64_t bucket_cap_mb = 25;
};

}  // namespace tessera::fsdp
TESSERA_API_END
