#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <unordered_set>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// What is computed and communicated in which type. Sharded parameters, their gradients and the
/// optimizer keep the type the parameter was made with.
struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype{};   ///< of all-gathers and computation
  std::optional<c10::ScalarType> reduce_dtype{};  ///< of gradient reduction; default: param_dtype
  std::optional<c10::ScalarType>
      output_dtype{};               ///< forward's floating-point results are cast to it
  bool cast_forward_inputs = true;  ///< floating-point arguments are cast to param_dtype
  /// Without output_dtype: results are cast back to the type that the first floating-point argument
  /// had. For a unit that computes in another type than those around it (norms in fp32).
  bool restore_input_dtype = false;
};

// Functions of options are called once a parameter, within fully_shard, with the parameter in its
// current state, maybe on the meta device. They must return the same on every rank.

/// The placement of a parameter (by its name within the unit) on the dimension that shards:
/// Shard(d) for any dimension, or Replicate(); nullopt: Shard(0).
///   options.shard_placement = [](const std::string& name, const at::Tensor& parameter) {
///     return name.ends_with("bias") ? std::optional<Placement>(Replicate{})
///                                   : std::optional<Placement>(Shard{parameter.dim() - 1});
///   };
using PlacementFunction =
    std::function<std::optional<Placement>(const std::string& name, const at::Tensor& parameter)>;

/// Which mesh a parameter (by its name within the unit) is split over instead of the unit's, for
/// example the experts of a mixture; nullopt: the unit's. As fully_shard's `mesh`.
///   options.parameter_mesh = [mesh](const std::string& name, const at::Tensor&) {
///     return name.starts_with("head") ? std::optional(mesh) : std::nullopt;
///   };
using MeshFunction =
    std::function<std::optional<DeviceMesh>(const std::string& name, const at::Tensor& parameter)>;

/// Shards, and with them gradients and the optimizer's state, live in the host's memory; parameters
/// are gathered on the mesh's device.
struct OffloadPolicy {
  /// In page-locked memory where the device is CUDA, so that copies run beside computation.
  bool pin_memory = true;
};

/// How a unit is sharded, gathered and reduced.
struct Options {
  MixedPrecisionPolicy mp_policy{};
  /// Default: shards live on the mesh's device, to which they are moved.
  std::optional<OffloadPolicy> offload_policy{};
  /// Free the gathered parameters after forward and gather them again in backward (ZeRO-3), or keep
  /// them in between (ZeRO-2). Default: true for every unit but the root, and for a root with a
  /// post_forward_mesh_size.
  std::optional<bool> reshard_after_forward{};
  /// Where the parameters are freed after forward: each n ranks side by side keep 1/n of them each,
  /// so that backward gathers among those only (ZeRO++'s hpZ; FSDP2's reshard_after_forward=n). n
  /// must divide the ranks that shard; 1, or all of them: nothing more than the shard is kept.
  std::int64_t post_forward_mesh_size = 1;
  /// Some ranks may leave this unit out of a forward (a branch, an expert). All ranks then gather
  /// it when the root's forward begins, or when a backward begins for which it was freed, and
  /// reduce it when backward ends, with zeros for what a rank did not use. Without it, a unit that
  /// only some ranks run makes their collectives differ.
  bool may_be_unused = false;
  PlacementFunction shard_placement{};
  /// Parameters with their own mesh are gathered and reduced over it. Where it is a part of the
  /// unit's mesh, other parts hold other parameters, which norms of gradients count. The sums of
  /// gradients are divided by the ranks of the root's mesh, over which the loss is the mean.
  MeshFunction parameter_mesh{};
  /// Left as they are: not moved, sharded, gathered, cast or reduced. Parameters and buffers. Also
  /// names trained parameters that are meant to be in no unit, wherever they are in the model.
  std::unordered_set<nn::SlotPtr> ignored{};
  /// plan_units: the unit may hold frozen and trainable parameters. Otherwise that is an Error:
  /// frozen ones would be gathered for backward with the others; in a separate unit they are not.
  bool allow_mixed_frozen = false;
};
/// What is not as by default, as C++ would say it: "{.reshard_after_forward = true}". Functions are
/// named only.
std::string to_string(const Options& options);
/// Writes to_string(options).
std::ostream& operator<<(std::ostream& stream, const Options& options);

}  // namespace tessera::fsdp
TESSERA_API_END
