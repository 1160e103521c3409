#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/fsdp/all_gather_extension.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

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

// Functions of options are asked once a parameter, when fully_shard is called, with the parameter
// as it is then, maybe on the meta device. They must answer alike on every rank.

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
  /// On a mesh of replicas (HSDP): split shards, gradients and the optimizer's state over all of
  /// its ranks, not each replica's alone. Parameters are gathered over all ranks once a step; from
  /// then on each rank keeps, in the type of computation, its piece of what its replica has
  /// gathered, so that backward and later micro-batches gather within the replica. Gradients are
  /// reduce-scattered over all ranks, in each micro-batch that reduces. See set_is_last_backward
  /// for what a step is. Not with post_forward_mesh_size.
  bool shard_over_replicas = false;
  /// Some ranks may leave this unit out of a forward (a branch, an expert). All ranks then gather
  /// it when the root's forward begins and reduce it when backward ends, with zeros for what a rank
  /// did not use. Without it, a unit that only some ranks run makes their collectives differ.
  bool may_be_unused = false;
  PlacementFunction shard_placement{};
  /// Parameters with a mesh of their own are gathered and reduced over it. Where it is a part of
  /// the unit's mesh, other parts hold other parameters, which norms of gradients count; the sums
  /// of gradients are divided by the ranks of the root's mesh, over which the loss is the mean.
  MeshFunction parameter_mesh{};
  /// Parameters that are gathered as something else than their values, such as 8-bit numbers.
  ExtensionFunction all_gather_extension{};
  /// Left as they are: not moved, sharded, gathered, cast or reduced. Parameters and buffers. Also
  /// names trained parameters that are meant to be in no unit, wherever they are in the model.
  std::unordered_set<nn::SlotPtr> ignored{};
};
/// What is not as by default, as C++ would say it: "{.reshard_after_forward = true}". Functions are
/// named only.
std::string to_string(const Options& options);
/// Writes to_string(options).
std::ostream& operator<<(std::ostream& stream, const Options& options);

/// Makes `module` one FSDP unit: its parameters, and those below it that belong to no unit yet, are
/// split over `mesh`, on dimension 0 as torch.chunk does unless options say otherwise (a scalar is
/// replicated). They are gathered together before forward and before backward and freed after;
/// their gradients are reduce-scattered together, averaged over `mesh`. Apply bottom-up: blocks
/// first, the root last; the call on the root must be the forward, as root(x): root.forward(x)
/// skips the hooks. Outside of forward and backward slots hold the shards, also where a unit stays
/// gathered in between. Parameters may be on the meta device.
///
/// `mesh`: one dimension, that shards; or two, of which the first replicates and the second shards
/// (HSDP: gradients are also all-reduced over the first; or see shard_over_replicas). Parameters
/// are moved to its device. If it is a slice of a larger mesh, parameters that tensor parallelism
/// has put on another slice become distributed on both.
///
/// Buffers are moved to that device as well, and so is what the root's forward is given, all but
/// meta and distributed tensors.
///
/// Not collective. Forward and backward of a unit are collective over `mesh`; one thread at a time
/// may run them for a root and the units below it. Gradients of parameters that a rank did not use
/// count as zeros; those that no rank used get none. What happens when, and which calls may follow
/// which, is in docs/fsdp_states.md. FSDP2's fully_shard. Throws Error, before anything is changed,
/// for another mesh, options that contradict each other, a module wrapped already, or a parameter
/// that cannot be split as asked or is shared with a module outside.
void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});
/// Several modules as one unit: gathered before the first of them runs, freed after the last. They
/// must all run in each forward, and none may be the root.
void fully_shard(const std::vector<nn::ModuleBase*>& modules, const DeviceMesh& mesh,
                 const Options& options = {});

/// Data parallelism on the same engine: makes `module` one unit whose parameters every rank of the
/// 1-D `mesh` keeps unsharded, as distributed tensors that are replicated. Nothing is gathered;
/// gradients are all-reduced together, beside the rest of backward, and averaged. The ranks'
/// parameters must be equal: the first forward compares them, and throws Error on all ranks if they
/// differ. Bottom-up as fully_shard, with which it combines in one model; what is
/// said of units holds for these too. DDP; FSDP2's replicate.
///
/// Not collective. Throws Error as fully_shard does, for a mesh of more dimensions, and for options
/// that say how to split: shard_placement, parameter_mesh, post_forward_mesh_size,
/// shard_over_replicas, all_gather_extension.
void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});

/// What a rank's mean over its own `rows` is multiplied by, so that the mean over the ranks of
/// `mesh`, which FSDP takes of gradients, is the mean over all rows: rows * ranks / all rows.
/// `mesh`: of any dimensions, that of the root. A rank without rows has no mean: give it a loss of
/// 0.
///   (at::mse_loss(model(x), target) * fsdp::mean_weight(x.size(0), mesh)).backward();
/// Collective, between the hosts. Throws Error on all ranks for a negative number of rows, and if
/// no rank has any.
double mean_weight(std::int64_t rows, const DeviceMesh& mesh);

/// All ranks of `world` as one dimension, "dp". Throws Error for a null world.
DeviceMesh world_mesh(const comm::WorldPtr& world);
// On that mesh, as FSDP2 does where it is given none. A process has no world of its own that could
// be left out here as well: its threads may be ranks of one or of several.
/// On world_mesh(world).
void fully_shard(nn::ModuleBase& module, const comm::WorldPtr& world, const Options& options = {});
/// On world_mesh(world).
void fully_shard(const std::vector<nn::ModuleBase*>& modules, const comm::WorldPtr& world,
                 const Options& options = {});
/// On world_mesh(world).
void replicate(nn::ModuleBase& module, const comm::WorldPtr& world, const Options& options = {});

/// Whether fully_shard or replicate was applied to exactly this module.
bool is_fully_sharded(const nn::ModuleBase& module);

/// What messages call the unit of exactly this module, "unit 'layers.3'", by its FQN from the first
/// forward on; "" if it is in none. Modules that are one unit together have one name.
std::string unit_name(const nn::ModuleBase& module);

/// For a message about an error that ended a forward or backward of this model: "the forward of
/// unit 'layers.3'", of units within each other the innermost; "" if neither has begun. Not
/// collective.
///   try { loss_of(batch).backward(); } catch (const c10::Error& error) {
///     fail(fsdp::under_way(*model), ": ", error.what_without_backtrace());
///   }
std::string under_way(const nn::ModuleBase& module);

class Unit;

/// A gather that was begun. Dropping it does no harm: forward or unshard waits instead.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}
  /// Until the parameters are unsharded. Collective; a second time, or after the module is gone, it
  /// does nothing.
  void wait();

 private:
  std::weak_ptr<Unit> unit_;
};

/// Gathers or frees a unit's parameters by hand (not those of units below it). unshard is
/// collective; it reads shards as the compute lane leaves them. Each does nothing where it is done
/// already. Throw Error for a module that is no unit; unshard also for parameters that are still on
/// the meta device, and if ranks gather different units.
void unshard(nn::ModuleBase& module);
/// Frees a unit's unsharded parameters. Not collective; does nothing if they are freed.
void reshard(nn::ModuleBase& module);
/// Begins to gather; forward, unshard or the handle waits for it. Collective. Throws as unshard.
UnshardHandle start_unshard(nn::ModuleBase& module);

/// Unsharded parameters for as long as this lives; frees them after, unless they were unsharded
/// before. Collective. Throws as unshard.
class UnshardScope {
 public:
  explicit UnshardScope(nn::ModuleBase& module);
  UnshardScope(const UnshardScope&) = delete;
  UnshardScope& operator=(const UnshardScope&) = delete;
  ~UnshardScope();

 private:
  std::shared_ptr<Unit> unit_;  ///< nullptr: the slots held them before
  bool was_unsharded_;          ///< for the backward that is to come
};

// Settings that may change between iterations. Like the collectives that they govern, they must be
// the same on every rank. They apply to the unit of `module` and, unless `recurse` is false, to
// those below it. None is collective; each throws Error, before anything is changed, if there is no
// unit.

/// ZeRO-3 (true) or ZeRO-2 (false).
void set_reshard_after_forward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// False: parameters stay gathered after backward, until they are resharded by hand or after a
/// later backward. For micro-batches between which nothing writes to the parameters.
void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// False: backward reduces nothing; each rank adds up its unsharded gradients (in reduce_dtype)
/// until the first backward with true reduces the sum. Until then `.grad` of a parameter can be
/// dropped (zero_grad) and not read. Accumulation of micro-batches at the price of the memory of
/// unsharded gradients.
void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse = true);
/// Under HSDP, false: backward sums gradients over the ranks that shard and keeps the sums, in
/// reduce_dtype, for the next backward with true, which adds them to its own and sums over the
/// replicas. Micro-batches may use different parameters. Under shard_over_replicas gradients are
/// complete at once: it says only that the step goes on.
void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse = true);
/// False: the reductions of the next backwards may be under way when they return, and gradients are
/// complete after a later backward with true: until then `.grad` of a parameter whose reduction is
/// under way can be dropped (zero_grad) and not read. For all micro-batches but the last. `module`:
/// the root. Under shard_over_replicas, false, here or in the two settings above, says that the
/// step goes on: pieces are kept from one micro-batch to the next, on all ranks as long as no rank
/// writes to its shards (as autograd's version counters say), and freed after the backward that
/// ends it.
void set_is_last_backward(nn::ModuleBase& module, bool last);
/// False: backward does not gather the unit's parameters, because its gradients do not need them
/// (an embedding).
void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse = false);
/// What the sum of the ranks' gradients is divided by; default: the number of ranks of the root's
/// mesh, of parameters on ranks that are not all of that the number of their own. 1 for a loss that
/// every rank computes of the gathered features of all. Throws Error for a factor that is not
/// positive and finite.
void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse = true);
/// True: gradients are summed as they are and divided once, after. The default for all types but
/// fp16, where half of the division comes before the sum, so that it does not overflow: for ranks
/// whose hardware sums in a wider type, or gradients that are small enough.
void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse = true);

/// True: units gather in the compute lane, where the collective itself runs beside computation (on
/// CUDA in NCCL's stream) until unshard waits for it there. What is gathered is then memory of that
/// lane alone, which the next layer can use at once; but a gather begins only after the computation
/// that was issued before it, so that it overlaps only if it is begun ahead. Takes effect with each
/// unit's next gather.
void set_unshard_async_op(nn::ModuleBase& module, bool async_op, bool recurse = true);

/// Units to begin gathering when forward comes to `module`'s. Without it, forward begins to gather
/// the unit that the root's last forward gathered next, one at a time. Throws Error for a module
/// that is no unit.
void set_forward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);
/// The same for backward. Without it, backward begins to gather the unit that ran before in
/// forward.
void set_backward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);

}  // namespace tessera::fsdp
TESSERA_API_END
