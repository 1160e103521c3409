#pragma once

#include <concepts>
#include <utility>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/fsdp/custom_collectives.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

// They apply to the unit of `module` and, if `recurse`, to those below it; an empty function
// removes them. Where a unit has its own all-gather or reduce-scatter, its tensors are packed;
// ranks that disagree get an Error about what goes through `group`. Not collective themselves, and
// not to be called while a forward or backward runs; every rank must set the same. Throw Error,
// before anything is changed, if there is no unit.
//   fsdp::set_custom_all_gather(*model, [](comm::Communicator& group, const at::Tensor& output,
//                                          const at::Tensor& input) {
//     return group.all_gather(output, input);
//   });
//   fsdp::set_custom_reduce_scatter(*model, [](comm::Communicator& group, const at::Tensor& output,
//                                              const at::Tensor& input) {
//     return group.reduce_scatter(output, input, ReduceOp::kSum);
//   });

/// Replaces the all-gather of the parameters, the memory of its tensors, or both. `allocate` makes
/// the tensors that the collective is given, both input and output: memory that it can reach from
/// other ranks, say. With an empty `all_gather` the communicator's is given them. It is called in
/// the lane of the collective. Buffers are reused across units, possibly with another dtype. They
/// are dropped once the collective and its readers are done. FSDP2's `Comm.allocate`.
///   fsdp::set_custom_all_gather(*model, {}, [](comm::Communicator&, std::int64_t numel,
///                                              const c10::TensorOptions& options) {
///     return at::empty({numel}, options);
///   });
void set_custom_all_gather(nn::ModuleBase& module, AllGather all_gather,
                           AllocateBuffer allocate = {}, bool recurse = true);
/// The same for the reduce-scatter of the gradients; under replicate `allocate` makes the tensors
/// that are all-reduced. For gradients that are packed it is called where they are computed. The
/// output is dropped once the gradients in it are.
void set_custom_reduce_scatter(nn::ModuleBase& module, ReduceScatter reduce_scatter,
                               AllocateBuffer allocate = {}, bool recurse = true);
/// The form of 0.1, with `recurse` alone. A template, so that braces mean an allocate.
template <std::same_as<bool> Recurse>
[[deprecated("pass allocate = {} before recurse")]] void set_custom_all_gather(
    nn::ModuleBase& module, AllGather all_gather, Recurse recurse) {
  set_custom_all_gather(module, std::move(all_gather), {}, recurse);
}
/// The same of the reduce-scatter.
template <std::same_as<bool> Recurse>
[[deprecated("pass allocate = {} before recurse")]] void set_custom_reduce_scatter(
    nn::ModuleBase& module, ReduceScatter reduce_scatter, Recurse recurse) {
  set_custom_reduce_scatter(module, std::move(reduce_scatter), {}, recurse);
}
/// FSDP2's set_all_reduce_hook.
///   fsdp::set_all_reduce_hook(*model, [](const at::Tensor& gradients) { gradients.clamp_(-1, 1);
///   });
void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse = true);
/// The hook is called, and its gradients divided and added up, in a separate lane (PyTorch's
/// `stream`), which is current within the hook: after the reduction, beside the next unit's, and
/// before backward returns. The hook may use another stream of the caller's and join it by events.
/// At most one unit's are under way while the next are reduced. Throws Error, before anything is
/// changed, for a unit with replicas (HSDP, replicate).
///   fsdp::set_all_reduce_hook(*model, sum_over_sites, comm::Lane::kAllReduce);
void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, comm::Lane lane,
                         bool recurse = true);

/// True: a unit's all-gathers and reduce-scatters send from and receive into memory that their
/// groups allocate (Communicator::allocate). With NCCL that memory is registered, which lets the
/// network or the switches do more of the work. Tensors are packed into it. Reduced gradients stay
/// there until they are dropped. Takes effect with the next forward. Throws Error where a unit has
/// a custom all-gather, reduce-scatter or allocator; those setters throw where this is set.
void set_allocate_memory_from_process_group_for_comm(nn::ModuleBase& module, bool allocate,
                                                     bool recurse = true);

/// The gathers of the next forward wait for `event`, the end of the optimizer's update, instead of
/// for all that has been issued when it begins. For that forward only. `root`: the root.
///   const comm::StreamsPtr streams = comm::make_streams(mesh.device());
///   optimizer.step();
///   fsdp::set_post_optim_event(*model, streams->record(comm::Lane::kCompute));
/// Throws Error for a module that is not a unit, or whose unit ran as part of another root.
void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event);

/// Lets several roots (the stages of a pipeline) use the same streams and buffers, and reduce one
/// unit at a time between them. Work under way in another context is finished first, which is
/// collective. Throws Error for a module that is not a unit.
///   fsdp::share_context({first_stage.get(), second_stage.get()});
void share_context(const std::vector<nn::ModuleBase*>& roots);

}  // namespace tessera::fsdp
TESSERA_API_END
