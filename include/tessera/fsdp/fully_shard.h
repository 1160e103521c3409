#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// Makes `module` one FSDP unit (FSDP2's fully_shard). The unit's parameters are the parameters of
/// `module` and of modules below `module` that belong to no unit yet. The parameters are split over
/// `mesh`: on dimension 0 as by torch.chunk, unless the options say otherwise (scalars are
/// replicated). A unit's parameters are gathered together before forward and before backward and
/// freed afterwards. Their gradients are reduce-scattered together and averaged over `mesh`. Apply
/// fully_shard bottom-up: blocks first, the root last. Call the root's forward as root(x), because
/// root.forward(x) skips the hooks. Outside of forward and backward, the module's parameters are
/// the shards, even if the unit remains gathered. Parameters may be on the meta device.
///
/// `mesh`: one dimension, over which parameters are sharded. Or two dimensions (HSDP): replicas
/// along the first, shards along the second; gradients are also all-reduced over the first.
/// Parameters are moved to the mesh's device. If `mesh` is a slice of a larger mesh, parameters
/// that tensor parallelism has put on another slice become distributed on both slices.
///
/// Buffers are moved to the mesh's device as well, and so are the inputs of the root's forward,
/// except meta and distributed tensors.
///
/// Not collective. Forward and backward of a unit are collective over `mesh`; only one thread at a
/// time may run the forward or backward of a root and of units below the root. If a rank did not
/// use a parameter, the parameter's gradient on this rank counts as zero; a parameter that no rank
/// used gets no gradient. docs/fsdp.md describes the order of events and the legal orders of calls.
/// Throws Error, before anything is changed, for a mesh without one or two dimensions, options that
/// contradict each other, a module that is already a unit, and a parameter that cannot be split as
/// requested or is shared with a module outside of `module`.
void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});
/// Makes several modules one FSDP unit. The unit is gathered before the first of these modules runs
/// and freed after the last of these modules has run. All of the modules must run in each forward,
/// and none may be the root.
void fully_shard(const std::vector<nn::ModuleBase*>& modules, const DeviceMesh& mesh,
                 const Options& options = {});

/// Data parallelism without sharding (DDP; FSDP2's replicate). Makes `module` one unit. Every rank
/// of the 1-D `mesh` stores all parameters of the unit, as replicated distributed tensors. Nothing
/// is gathered. Gradients are all-reduced in buckets (Options::bucket_cap_mb), while backward
/// continues, and averaged. The parameters must be equal on all ranks: the first forward compares
/// the parameters and throws Error on all ranks if they differ. Apply replicate bottom-up like
/// fully_shard; both may be used in one model. The rules for units of fully_shard apply to units of
/// replicate.
///
/// Not collective. Throws Error as fully_shard does, for a mesh of more than one dimension, and for
/// options that say how to split: shard_placement, parameter_mesh, post_forward_mesh_size. Also
/// throws Error for a bucket_cap_mb that is not positive.
void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});

/// Returns the weight rows * ranks / (rows of all ranks), where `rows` is this rank's number of
/// rows of the batch. A rank multiplies its loss, the mean over its rows, by the weight. FSDP's
/// average over the ranks is then the gradient of the mean over all rows. `mesh`: the root module's
/// mesh, with any number of dimensions. A rank without rows has no mean (libtorch returns NaN): use
/// a zero loss that depends on the model, such as y.sum() of the empty output y.
///   (at::mse_loss(model(x), target) * fsdp::mean_weight(x.size(0), mesh)).backward();
/// Collective; the ranks exchange CPU values only. Throws Error on all ranks if a number of rows is
/// negative or if no rank has rows.
double mean_weight(std::int64_t rows, const DeviceMesh& mesh);

/// Returns FSDP2's default mesh: all ranks of `world` in one dimension, "dp". The world must be
/// passed, because a process has no default world: its threads can be ranks of one or of several
/// worlds. Throws Error for a null world.
DeviceMesh world_mesh(const comm::WorldPtr& world);
/// Makes a method of a unit's module callable from outside, like FSDP2's
/// register_fsdp_forward_method:
///   const auto encode = fsdp::register_forward_method(*model, &Model::encode);
///   const at::Tensor code = encode(x);
/// A call of `encode` copies its arguments and behaves like forward: parameters are unsharded
/// during the call, and their gradients are reduced in the backward. A call is collective and
/// differentiable. A direct call of the method does not gather. If the module was split by
/// tensor_parallel::parallelize_module, the method runs in the same scope as forward. For a module
/// without FSDP and tensor parallelism, `encode` only calls the method. The module must outlive
/// `encode`. Throws Error for a null method.
template <class M, class Method>
[[nodiscard]] auto register_forward_method(M& module, Method method) {
  static_assert(std::derived_from<M, nn::ModuleBase>,
                "pass the module itself, *model, and not the pointer to it");
  static_assert(std::is_member_function_pointer_v<Method>, "pass a method, such as &Model::encode");
  TESSERA_CHECK(method != nullptr, "register_forward_method: the method of a ", module.name(),
                " is null; pass a method, such as &Model::encode");
  return [&module, method](auto&&... args) {
    const auto call = [&](auto&... values) { return (module.*method)(values...); };
    return module.call_method(call, std::forward<decltype(args)>(args)...);
  };
}

/// Describes where a forward or backward of this model was interrupted by an error, for messages:
/// "the forward of unit 'layers.3'". Names the innermost of nested units; "" if neither forward nor
/// backward has begun. Not collective.
///   try { loss_of(batch).backward(); } catch (const c10::Error& error) {
///     fail(fsdp::current_unit(*model), ": ", error.what_without_backtrace());
///   }
std::string current_unit(const nn::ModuleBase& module);
/// The deprecated former name of current_unit().
[[deprecated("use current_unit")]] inline std::string under_way(const nn::ModuleBase& module) {
  return current_unit(module);
}

class Unit;

/// The handle of the all-gather of a unit's parameters that start_unshard() has started. If the
/// handle is destroyed without wait(), the next forward or unshard waits for the gather.
class UnshardHandle {
 public:
  /// Waits until the parameters are unsharded. Collective. A second call does nothing, and so does
  /// a call after the module was destroyed.
  void wait();

 private:
  friend UnshardHandle start_unshard(nn::ModuleBase& module);
  explicit UnshardHandle(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}
  std::weak_ptr<Unit> unit_;
};

/// All-gathers the parameters of the unit of `module`, but not of units below `module`. Collective.
/// First waits for earlier work on the compute stream, because this work may write the shards. Does
/// nothing if the parameters are already unsharded. If shards were written since the last gather on
/// any rank (the ranks compare CPU flags), the next unshard, start_unshard, UnshardScope or forward
/// gathers again on all ranks. Throws Error for a module that is not a unit, for parameters that
/// are still on the meta device, and if ranks gather different units.
void unshard(nn::ModuleBase& module);
/// Frees the unsharded parameters of a unit. Not collective; does nothing if the parameters are not
/// unsharded. Unsharded parameters are copies: if the program has written to an unsharded parameter
/// since unshard, reshard frees the parameters and then throws Error. If a forward runs before
/// reshard, the forward throws Error for such a write and frees nothing. Throws Error for a module
/// that is not a unit.
void reshard(nn::ModuleBase& module);
/// Starts to gather the parameters of a unit, with the shards' values at the time of this call. The
/// next forward or unshard, or the returned handle, waits for the gather. Collective. Throws the
/// errors of unshard.
UnshardHandle start_unshard(nn::ModuleBase& module);

/// Unshards the parameters of a unit while the object exists. The destructor frees the parameters
/// unless they were unsharded before, and warns of a write to a parameter, because the write is
/// lost. Collective. Throws the errors of unshard.
class UnshardScope : tessera::detail::NoCopy {
 public:
  explicit UnshardScope(nn::ModuleBase& module);
  ~UnshardScope();

 private:
  std::shared_ptr<Unit> unit_;
  bool was_unsharded_;
};

// The set_ functions change a unit's settings, also between iterations. The settings must be the
// same on every rank, because they control collectives. A setting applies to the unit of `module`
// and, unless `recurse` is false, to the units of modules below `module`. No setter is collective.
// Each setter throws Error, before anything is changed, if there is no such unit.

/// With `reshard` true, a unit's parameters are freed after forward (ZeRO-3); with false,
/// parameters remain gathered for backward (ZeRO-2).
void set_reshard_after_forward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// With `reshard` false, parameters remain gathered after backward, until reshard() or a later
/// backward frees them. Use false if nothing writes to the parameters between micro-batches. After
/// a write, such as an optimizer's step, the next forward gathers the parameters again.
void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// With `sync` false, backward reduces nothing: each rank adds up its unsharded gradients (in
/// reduce_dtype) until the first backward with `sync` true reduces the sum. Until then `.grad` of a
/// parameter can be dropped (zero_grad) but not read. Use false to accumulate micro-batches at the
/// cost of the memory of unsharded gradients.
void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse = true);
/// With `all_reduce` false (HSDP), backward sums gradients over the shard dimension of the mesh
/// only and stores the sums, in reduce_dtype. The next backward with `all_reduce` true adds its own
/// sums to the stored sums, and all-reduces the result over replicas. Micro-batches may use
/// different parameters.
void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse = true);
/// With `last` false, reductions can still be in progress when a backward returns. Gradients are
/// complete after a later backward with `last` true. Until then `.grad` of a parameter whose
/// reduction is in progress can be dropped (zero_grad) but not read. Use false for all
/// micro-batches except the last one. `module`: the root module.
void set_is_last_backward(nn::ModuleBase& module, bool last);
/// With `unshard` false, backward does not gather the unit's parameters. Use false for a unit whose
/// gradients do not depend on its parameters (an embedding, for example).
void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse = false);
/// Sets the number by which the sum of the ranks' gradients is divided. Default: the number of
/// ranks of the root's mesh, or of a parameter's own mesh if that mesh has ranks outside of the
/// root's mesh. Use 1 if every rank gathers the features of all ranks and computes one common loss.
/// Throws Error for a factor that is not positive and finite.
void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse = true);
/// With `force` true, gradients are divided once, after they have been summed over the ranks.
/// `force` true is the default for all dtypes except fp16. With fp16, a part of the division
/// precedes the sum, to avoid overflow; pass true if the hardware sums in a wider dtype, or if the
/// gradients are small enough.
void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse = true);

/// A function that changes the reduced gradients of a unit in place before their division, for
/// example to reduce the gradients over another process group. The hook gets one flat tensor, in
/// reduce_dtype, with all gradients of one dtype or, under replicate(), the gradients of one
/// bucket. On one rank, where nothing is reduced, the hook is called for each gradient. Under HSDP
/// the gradients have already been all-reduced. The hook runs on the stream of the reduction, and
/// the next unit's reduction waits for the hook.
using AllReduceHook = std::function<void(const at::Tensor& gradients)>;
/// Sets the all-reduce hook of a unit (FSDP2's set_all_reduce_hook). An empty function removes the
/// hook.
///   fsdp::set_all_reduce_hook(*model, [](const at::Tensor& gradients) { gradients.clamp_(-1, 1);
///   });
void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse = true);

/// Makes the all-gathers of the next forward wait for `event`, the end of the optimizer's update.
/// Without this call the all-gathers wait for all work that was issued before the forward. Applies
/// to one forward. `root`: the root module.
///   optimizer.step();
///   fsdp::set_post_optim_event(*model, comm::record_event(mesh.device()));
/// Throws Error for a module that is not a unit, and for a unit that ran below another root.
void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event);

/// Sets the units whose gathers start when forward reaches the unit of `module`. Default: only the
/// unit that ran after the unit of `module` in the root's last forward. Throws Error for a module
/// that is not a unit.
void set_forward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);
/// Sets the units whose gathers start when backward reaches the unit of `module`. Default: only the
/// unit that ran in forward immediately before the unit of `module`.
void set_backward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);

}  // namespace tessera::fsdp
TESSERA_API_END
