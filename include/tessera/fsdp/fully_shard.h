#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// Makes `module` one FSDP unit: its parameters, and those below it that belong to no unit yet, are
/// split over `mesh`, on dimension 0 as torch.chunk does unless options say otherwise (a scalar is
/// replicated). They are gathered together before forward and before backward and freed after;
/// their gradients are reduce-scattered together, averaged over `mesh`. Apply bottom-up: blocks
/// first, the root last; the call on the root must be the forward, as root(x): root.forward(x)
/// skips the hooks. Outside of forward and backward slots hold the shards, also where a unit stays
/// gathered in between. Parameters may be on the meta device.
///
/// `mesh`: one dimension, that shards; or two, where the first replicates and the second shards
/// (HSDP: gradients are also all-reduced over the first). Parameters
/// are moved to its device. If it is a slice of a larger mesh, parameters that tensor parallelism
/// has put on another slice become distributed on both.
///
/// Buffers are moved to that device as well, and so are the inputs of the root's forward, except
/// meta and distributed tensors.
///
/// Not collective. Forward and backward of a unit are collective over `mesh`; one thread at a time
/// may run them for a root and the units below it. Gradients of parameters that a rank did not use
/// count as zeros; those that no rank used get none. What happens when, and which calls may follow
/// which, is in docs/fsdp.md. FSDP2's fully_shard. Throws Error, before anything is changed,
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
/// that say how to split: shard_placement, parameter_mesh, post_forward_mesh_size.
void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});

/// What a rank's mean over its own `rows` is multiplied by, so that the mean over the ranks of
/// `mesh`, which FSDP takes of gradients, is the mean over all rows: rows * ranks / all rows.
/// `mesh`: of any dimensions, that of the root. A rank without rows has no mean (libtorch's is
/// NaN): give it a loss of 0, such as y.sum() of a result without rows.
///   (at::mse_loss(model(x), target) * fsdp::mean_weight(x.size(0), mesh)).backward();
/// Collective, between the hosts. Throws Error on all ranks for a negative number of rows, and if
/// no rank has any.
double mean_weight(std::int64_t rows, const DeviceMesh& mesh);

/// All ranks of `world` as one dimension, "dp". Throws Error for a null world.
DeviceMesh world_mesh(const comm::WorldPtr& world);
// FSDP2 takes that mesh where none is given. Here the world must be passed: a process has no
// default world, since its threads may be ranks of one or of several.
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
///     fail(fsdp::current_unit(*model), ": ", error.what_without_backtrace());
///   }
std::string current_unit(const nn::ModuleBase& module);
/// A deprecated name.
[[deprecated("use current_unit")]] inline std::string under_way(const nn::ModuleBase& module) {
  return current_unit(module);
}

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

/// Gathers or frees a unit's parameters manually (not those of units below it). unshard is
/// collective; it reads shards as the compute lane leaves them. Each does nothing where it is done
/// already; what was written to shards since is gathered again at the next unshard, start_unshard,
/// UnshardScope or forward, on all ranks, which compare that between their hosts. Throw Error for a
/// module that is not a unit; unshard also for parameters that are still on the meta device, and if
/// ranks gather different units.
void unshard(nn::ModuleBase& module);
/// Frees a unit's unsharded parameters. Not collective; does nothing if they are freed. While a
/// backward is to come, all ranks free a unit that may be unused, or none does. They are copies: if
/// the program has written to one since unshard, throws Error after it has freed them. A forward
/// that comes before throws too, and leaves them.
void reshard(nn::ModuleBase& module);
/// Begins to gather, with the values that the shards have at this call; forward, unshard or the
/// handle waits for it. Collective. Throws as unshard.
UnshardHandle start_unshard(nn::ModuleBase& module);

/// Unsharded parameters for as long as this lives; frees them after, unless they were unsharded
/// before. Collective. Throws as unshard. The destructor warns of a parameter that was written: the
/// write is lost.
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
/// False: parameters stay gathered after backward, until reshard() or a later backward frees them.
/// For micro-batches between which nothing writes to the parameters: after a write, such as an
/// optimizer's step, the next forward gathers them again.
void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// False: backward reduces nothing; each rank adds up its unsharded gradients (in reduce_dtype)
/// until the first backward with true reduces the sum. Until then `.grad` of a parameter can be
/// dropped (zero_grad) and not read. Accumulation of micro-batches at the price of the memory of
/// unsharded gradients.
void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse = true);
/// Under HSDP, false: backward sums gradients over the ranks that shard and keeps the sums, in
/// reduce_dtype, for the next backward with true, which adds them to its own and sums over the
/// replicas. Micro-batches may use different parameters.
void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse = true);
/// False: the reductions of the next backwards may be under way when they return. Gradients are
/// complete after a later backward with true: until then `.grad` of a parameter whose reduction is
/// under way can be dropped (zero_grad) but not read. For all micro-batches but the last. `module`:
/// the root.
void set_is_last_backward(nn::ModuleBase& module, bool last);
/// False: backward does not gather the unit's parameters, because its gradients do not need them
/// (an embedding).
void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse = false);
/// What the sum of the ranks' gradients is divided by. Default: the number of ranks of the root's
/// mesh; for parameters on ranks that are not all in that mesh, the number of their own ranks. 1
/// for a loss that every rank computes from the gathered features of all. Throws Error for a factor
/// that is not positive and finite.
void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse = true);
/// True: gradients are summed undivided and divided once, after the sum. The default for all types
/// but fp16. With fp16, half of the division comes before the sum, so that it does not overflow:
/// true is for ranks whose hardware sums in a wider type, or gradients that are small enough.
void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse = true);

/// True: units gather in the compute lane, where the collective itself runs beside computation (on
/// CUDA in NCCL's stream) until unshard waits for it there. What is gathered is then memory of that
/// lane alone, which the next layer can use at once; but a gather begins only after the computation
/// that was issued before it, so that it overlaps only if it is begun ahead. Takes effect with each
/// unit's next gather.
void set_unshard_async_op(nn::ModuleBase& module, bool async_op, bool recurse = true);

/// Changes a unit's reduced gradients in place, before they are divided: all of a type together,
/// flat, in reduce_dtype; on one rank, where nothing is reduced, one by one. Under HSDP they have
/// been all-reduced. To reduce them further, over a group of the caller's own. It is called where
/// the reduction runs: the next unit's waits for it.
using AllReduceHook = std::function<void(const at::Tensor& gradients)>;
/// FSDP2's set_all_reduce_hook. An empty function removes it.
///   fsdp::set_all_reduce_hook(*model, [](const at::Tensor& gradients) { gradients.clamp_(-1, 1);
///   });
void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse = true);

/// The gathers of the next forward wait for `event`, the end of the optimizer's update, instead of
/// for all that has been issued when it begins. For that forward only. `root`: the root.
///   const comm::StreamsPtr streams = comm::make_streams(mesh.device());
///   optimizer.step();
///   fsdp::set_post_optim_event(*model, streams->record(comm::Lane::kCompute));
/// Throws Error for a module that is not a unit, or whose unit ran as part of another root.
void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event);

/// Units to begin gathering when forward comes to `module`'s. Without it, forward begins to gather
/// the unit that the root's last forward gathered next, one at a time. Throws Error for a module
/// that is not a unit.
void set_forward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);
/// The same for backward. Without it, backward begins to gather the unit that ran before in
/// forward.
void set_backward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);

}  // namespace tessera::fsdp
TESSERA_API_END
