#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/fsdp/all_gather_extension.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

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

/// How a parameter (by its name within the unit) lies on the dimension that shards: Shard(d) for
/// any dimension, or Replicate(); nullopt: Shard(0).
using PlacementFunction =
    std::function<std::optional<Placement>(const std::string& name, const at::Tensor& parameter)>;

/// Which mesh a parameter (by its name within the unit) is split over instead of the unit's, for
/// example the experts of a mixture; nullopt: the unit's. As fully_shard's `mesh`.
using MeshFunction =
    std::function<std::optional<DeviceMesh>(const std::string& name, const at::Tensor& parameter)>;

/// Shards, and with them gradients and the optimizer's state, live in the host's memory; parameters
/// are gathered on the mesh's device.
struct OffloadPolicy {
  /// In page-locked memory where the device is CUDA, so that copies run beside computation.
  bool pin_memory = true;
};

struct Options {
  MixedPrecisionPolicy mp_policy{};
  /// Default: shards live on the mesh's device, to which they are moved.
  std::optional<OffloadPolicy> offload_policy{};
  /// Free the gathered parameters after forward and gather them again in backward (ZeRO-3), or keep
  /// them in between (ZeRO-2). Default: true for every unit but the root, and for a root with
  /// neighbours.
  std::optional<bool> reshard_after_forward{};
  /// Where the parameters are freed after forward: keep 1/n of them on each of n neighbouring
  /// ranks, so that backward gathers among those only (ZeRO++'s hpZ). Must divide the ranks that
  /// shard; 1, or all of them: nothing more than the shard is kept.
  std::int64_t neighbours = 1;
  /// On a mesh of replicas (HSDP): split shards, gradients and the optimizer's state over all of
  /// its ranks, not each replica's alone. Parameters are gathered over all ranks once a step; from
  /// then on each rank keeps, in the type of computation, its piece of what its replica has
  /// gathered, so that backward and later micro-batches gather within the replica. Gradients are
  /// reduce-scattered over all ranks, in each micro-batch that reduces. See set_is_last_backward
  /// for what a step is. Not with neighbours.
  bool shard_over_replicas = false;
  /// Some ranks may leave this unit out of a forward (a branch, an expert). All ranks then gather
  /// it when the root's forward begins and reduce it when backward ends, with zeros for what a rank
  /// did not use. Without it, a unit that only some ranks run makes their collectives differ.
  bool may_be_unused = false;
  PlacementFunction shard_placement{};
  /// Parameters with a mesh of their own are gathered and reduced over it, and their gradients
  /// averaged over its ranks. Where it is a part of the unit's mesh, other parts hold other
  /// parameters, which norms of gradients count.
  MeshFunction parameter_mesh{};
  /// Parameters that are gathered as something else than their values, such as 8-bit numbers.
  ExtensionFunction all_gather_extension{};
  /// Left as they are: not moved, sharded, gathered, cast or reduced. Parameters and buffers.
  std::unordered_set<nn::SlotPtr> ignored{};
};

/// Makes `module` one FSDP unit: its parameters, and those below it that belong to no unit yet, are
/// split over `mesh`, on dimension 0 as torch.chunk does unless options say otherwise (a scalar is
/// replicated). They are gathered together before forward and before backward and freed after;
/// their gradients are reduce-scattered together, averaged over `mesh`. Apply bottom-up: blocks
/// first, the root last; the call on the root must be the forward. Parameters may be on the meta
/// device.
///
/// `mesh`: one dimension, that shards; or two, of which the first replicates and the second shards
/// (HSDP: gradients are also all-reduced over the first; or see shard_over_replicas). Parameters
/// are moved to its device. If it is a slice of a larger mesh, parameters that tensor parallelism
/// has put on another slice become distributed on both.
///
/// Buffers are moved to that device as well, and so is what the root's forward is given, all but
/// meta and distributed tensors.
///
/// Not collective. Forward and backward of a unit are collective over `mesh`. Gradients of
/// parameters that a rank did not use count as zeros; those that no rank used get none. FSDP2's
/// fully_shard. Throws Error for another mesh, a module wrapped already, or a parameter that is
/// shared with a module outside.
void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});
/// Several modules as one unit: gathered before the first of them runs, freed after the last. They
/// must all run in each forward, and none may be the root.
void fully_shard(const std::vector<nn::ModuleBase*>& modules, const DeviceMesh& mesh,
                 const Options& options = {});

/// Data parallelism on the same engine: makes `module` one unit whose parameters every rank of the
/// 1-D `mesh` keeps whole, as distributed tensors that are replicated. Nothing is gathered;
/// gradients are all-reduced together, beside the rest of backward, and averaged. The ranks'
/// parameters must be equal. Bottom-up as fully_shard, with which it combines in one model; what is
/// said of units holds for these too. DDP; FSDP2's replicate.
///
/// Not collective. Throws Error as fully_shard does, for a mesh of more dimensions, and for options
/// that say how to split: shard_placement, parameter_mesh, neighbours, shard_over_replicas,
/// all_gather_extension.
void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});

/// All ranks of `world` as one dimension, "dp". Throws Error for a null world.
DeviceMesh world_mesh(const comm::WorldPtr& world);
// On that mesh, as FSDP2 does where it is given none. A process has no world of its own that could
// be left out here as well: its threads may be ranks of one or of several.
void fully_shard(nn::ModuleBase& module, const comm::WorldPtr& world, const Options& options = {});
void fully_shard(const std::vector<nn::ModuleBase*>& modules, const comm::WorldPtr& world,
                 const Options& options = {});
void replicate(nn::ModuleBase& module, const comm::WorldPtr& world, const Options& options = {});

/// Whether fully_shard or replicate was applied to exactly this module.
bool is_fully_sharded(const nn::ModuleBase& module);

class Unit;

/// A gather that was begun. Dropping it does no harm: forward or unshard waits instead.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}
  /// Until the parameters are whole. Collective; a second time, or after the module is gone, it
  /// does nothing.
  void wait();

 private:
  std::weak_ptr<Unit> unit_;
};

/// Gathers or frees a unit's parameters by hand (not those of units below it). unshard is
/// collective. Each does nothing where it is done already.
void unshard(nn::ModuleBase& module);
void reshard(nn::ModuleBase& module);
/// Begins to gather; forward, unshard or the handle waits for it. Collective.
UnshardHandle start_unshard(nn::ModuleBase& module);

/// Whole parameters for as long as this lives; frees them after, unless they were whole before.
/// Collective.
class UnshardScope {
 public:
  explicit UnshardScope(nn::ModuleBase& module);
  UnshardScope(const UnshardScope&) = delete;
  UnshardScope& operator=(const UnshardScope&) = delete;
  ~UnshardScope();

 private:
  std::shared_ptr<Unit> unit_;  ///< nullptr: was whole
};

// Settings that may change between iterations. Like the collectives that they govern, they must be
// the same on every rank. They apply to the unit of `module` and, unless `recurse` is false, to
// those below it; Error if there is none.

/// ZeRO-3 (true) or ZeRO-2 (false).
void set_reshard_after_forward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// False: parameters stay gathered after backward, until they are resharded by hand or after a
/// later backward. For micro-batches between which nothing writes to the parameters.
void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// False: backward reduces nothing; each rank adds up its whole gradients (in reduce_dtype) until
/// the first backward with true reduces the sum. Accumulation of micro-batches at the price of the
/// memory of whole gradients.
void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse = true);
/// Under HSDP, false: backward sums gradients over the ranks that shard and keeps the sums, in
/// reduce_dtype, for the next backward with true, which adds them to its own and sums over the
/// replicas. Micro-batches may use different parameters. Under shard_over_replicas gradients are
/// complete at once: it says only that the step goes on.
void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse = true);
/// False: the reductions of the next backwards may be under way when they return, and gradients are
/// complete after a later backward with true. For all micro-batches but the last. `module`: the
/// root. Under shard_over_replicas, false, here or in the two settings above, says that the step
/// goes on: pieces are kept from one micro-batch to the next, on all ranks as long as no rank
/// writes to its shards (as autograd's version counters say), and freed after the backward that
/// ends it.
void set_is_last_backward(nn::ModuleBase& module, bool last);
/// False: backward does not gather the unit's parameters, because its gradients do not need them
/// (an embedding).
void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse = false);
/// What the sum of the ranks' gradients is divided by; default: the number of ranks of the mesh.
void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse = true);
/// True: gradients are summed as they are and divided once, after. The default for all types but
/// fp16, where half of the division comes before the sum, so that it does not overflow: for ranks
/// whose hardware sums in a wider type, or gradients that are small enough.
void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse = true);

/// True: units gather in the compute lane, where the collective itself runs beside computation (on
/// CUDA in NCCL's stream) until unshard waits for it there. What is gathered is then memory of that
/// lane alone, which the next layer can use at once; but a gather begins only after the computation
/// that was issued before it, so that forward needs set_forward_prefetch to overlap. Takes effect
/// with each unit's next gather.
void set_unshard_async_op(nn::ModuleBase& module, bool async_op, bool recurse = true);

/// Units to begin gathering when forward (backward) comes to `module`'s. Backward's default is the
/// unit that ran before it in forward.
void set_forward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);
void set_backward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);

}  // namespace tessera::fsdp
