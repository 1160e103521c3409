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

/// Makes `module` one FSDP unit, like FSDP2's fully_shard. The unit has all parameters of `module`
/// that are in no earlier unit. Call fully_shard bottom-up, with the root last. Run the root as
/// root(x), because root.forward(x) skips the hooks.
///
/// `mesh`: one dimension of shards, or two dimensions (HSDP): replicas, then shards.
///
/// Not collective, but forward and backward of the unit are collective over `mesh`. One thread at a
/// time may run a root. See docs/fsdp.md. Throws Error if `mesh` or `options` are invalid, `module`
/// is already a unit, or a parameter cannot be split as requested.
void fully_shard(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});
/// Makes several modules one FSDP unit. Every forward must run all of the modules, and none may be
/// the root.
void fully_shard(const std::vector<nn::ModuleBase*>& modules, const DeviceMesh& mesh,
                 const Options& options = {});

/// Makes `module` one unit of data parallelism without sharding (DDP; FSDP2's replicate). Call
/// replicate bottom-up. `mesh`: one dimension. Backward averages gradients over `mesh`. The
/// parameters must be equal on all ranks; otherwise the first forward throws Error.
///
/// Not collective. Throws Error as fully_shard does, and for options that shard parameters.
void replicate(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options = {});

/// Returns the weight of this rank's loss if ranks have different numbers of rows: rows * ranks /
/// (rows of all ranks). Multiply the rank's mean loss by the weight before backward.
///   (at::mse_loss(model(x), target) * fsdp::mean_weight(x.size(0), mesh)).backward();
/// `rows`: this rank's rows of the batch. `mesh`: the root module's mesh. Collective. Throws Error
/// on all ranks for negative numbers of rows, or if no rank has rows.
double mean_weight(std::int64_t rows, const DeviceMesh& mesh);

/// Returns FSDP2's default mesh: all ranks of `world` in one dimension, "dp". Throws Error for a
/// null world.
DeviceMesh world_mesh(const comm::WorldPtr& world);
/// Returns a function that calls a method of a unit's module like forward: parameters are gathered
/// during the call. Like FSDP2's register_fsdp_forward_method.
///   const auto encode = fsdp::register_forward_method(*model, &Model::encode);
///   const at::Tensor code = encode(x);
/// Each call is collective, differentiable and copies its arguments. The module must outlive the
/// function. Throws Error for a null method.
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

/// Returns where an error interrupted forward or backward, such as "the forward of unit
/// 'layers.3'". Returns "" if neither forward nor backward has begun. Not collective.
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

/// All-gathers the parameters of the unit of `module`, without units of child modules. Does nothing
/// if the parameters are already gathered and no rank has written to a shard. Collective. Throws
/// Error for a module that is not a unit, and for parameters on the meta device.
void unshard(nn::ModuleBase& module);
/// Frees the gathered parameters of a unit. Not collective. Throws Error for a module that is not a
/// unit. Also throws Error after a write to a gathered parameter, because the write is lost.
void reshard(nn::ModuleBase& module);
/// Starts to gather the parameters of a unit. The next forward or unshard, or the returned handle,
/// waits for the gather. Collective. Throws Error as unshard does.
UnshardHandle start_unshard(nn::ModuleBase& module);

/// Gathers the parameters of a unit while the object exists. The destructor frees the parameters,
/// unless the parameters were gathered before. Collective. Throws Error as unshard does.
class UnshardScope : tessera::detail::NoCopy {
 public:
  explicit UnshardScope(nn::ModuleBase& module);
  ~UnshardScope();

 private:
  std::shared_ptr<Unit> unit_;
  bool was_unsharded_;
};

// The set_ functions change settings of the unit of `module` and, if `recurse` is true, of the
// units below `module`. Not collective, but every rank must choose the same settings. Throw Error
// if there is no such unit.

/// With `reshard` true, a unit's parameters are freed after forward (ZeRO-3); with false,
/// parameters remain gathered for backward (ZeRO-2).
void set_reshard_after_forward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// Sets whether backward frees the gathered parameters. Use false if no parameter is changed
/// between two micro-batches.
void set_reshard_after_backward(nn::ModuleBase& module, bool reshard, bool recurse = true);
/// Sets whether backward reduces gradients over the ranks. With false, each rank adds up unsharded
/// gradients until a backward with `sync` true. Until then `.grad` must not be read; zero_grad is
/// allowed.
void set_requires_gradient_sync(nn::ModuleBase& module, bool sync, bool recurse = true);
/// Sets whether backward all-reduces gradients over the replicas (HSDP). With false, backward only
/// reduces over the shard dimension and adds up the results. The next backward with `all_reduce`
/// true all-reduces the sum.
void set_requires_all_reduce(nn::ModuleBase& module, bool all_reduce, bool recurse = true);
/// Sets whether backward waits until all gradients are reduced. Use false for all micro-batches
/// except the last. After a backward with false, `.grad` must not be read; zero_grad is allowed.
/// `module`: the root module.
void set_is_last_backward(nn::ModuleBase& module, bool last);
/// With `unshard` false, backward does not gather the unit's parameters. Use false for a unit whose
/// gradients do not depend on its parameters (an embedding, for example).
void set_unshard_in_backward(nn::ModuleBase& module, bool unshard, bool recurse = false);
/// Sets the number by which the sum of the ranks' gradients is divided. The default is the number
/// of ranks of the root's mesh. Throws Error for a factor that is not positive and finite.
void set_gradient_divide_factor(nn::ModuleBase& module, double factor, bool recurse = true);
/// Sets whether all of the division follows the sum over the ranks. Only fp16 has the default
/// false: a part of the division precedes the sum, to avoid overflow.
void set_force_sum_reduction(nn::ModuleBase& module, bool force, bool recurse = true);

/// A function that changes reduced gradients in place, before the division. The argument is a flat
/// tensor in reduce_dtype: gradients of one dtype or, under replicate(), of one bucket. On one
/// rank, the function gets each gradient separately. The function runs on the stream of the
/// reduction.
using AllReduceHook = std::function<void(const at::Tensor& gradients)>;
/// Sets the all-reduce hook of a unit (FSDP2's set_all_reduce_hook). An empty function removes the
/// hook.
///   fsdp::set_all_reduce_hook(*model, [](const at::Tensor& gradients) { gradients.clamp_(-1, 1);
///   });
void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse = true);

/// Makes the all-gathers of the next forward wait only for `event`, the end of the optimizer's
/// update. Throws Error if `root` is not a unit, or ran below another root.
void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event);

/// Sets which units start to gather when forward reaches the unit of `module`. Default: the unit
/// that came next in the last forward. Throws Error for a module that is not a unit.
void set_forward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);
/// Sets the units whose gathers start when backward reaches the unit of `module`. Default: only the
/// unit that ran in forward immediately before the unit of `module`.
void set_backward_prefetch(nn::ModuleBase& module, const std::vector<nn::ModuleBase*>& units);

}  // namespace tessera::fsdp
TESSERA_API_END
