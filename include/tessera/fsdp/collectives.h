#pragma once

#include <functional>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Gathers a unit's packed parameters: output [ranks * n] = all ranks' inputs [n]. May return
/// nullptr if it is done.
using AllGather = std::function<comm::WorkPtr(comm::Communicator& group, const at::Tensor& output,
                                              const at::Tensor& input)>;
/// Sums a unit's packed gradients: output [n] = part `rank` of the sum of all ranks' inputs
/// [ranks * n]. May return nullptr if it is done.
using ReduceScatter = std::function<comm::WorkPtr(
    comm::Communicator& group, const at::Tensor& output, const at::Tensor& input)>;
/// Changes a unit's reduced gradients in place, before they are divided: all of a type together,
/// flat, in reduce_dtype; on one rank, where nothing is reduced, one by one. Under HSDP they have
/// been all-reduced. To reduce them further, over a group of the caller's own.
using AllReduceHook = std::function<void(const at::Tensor& gradients)>;

// They apply to the unit of `module` and, if `recurse`, to those below it; an empty function takes
// them away. Where a unit has its own all-gather or reduce-scatter, its tensors are packed; ranks
// that disagree are told so of what goes through `group`. Throw Error if there is no unit.

void set_custom_all_gather(nn::ModuleBase& module, AllGather all_gather, bool recurse = true);
void set_custom_reduce_scatter(nn::ModuleBase& module, ReduceScatter reduce_scatter,
                               bool recurse = true);
void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse = true);

/// True: what a unit's all-gathers and reduce-scatters send and receive lies in memory that their
/// groups allocate (Communicator::allocate): with NCCL, memory that it has registered, which lets
/// the network or the switches do more of the work. Tensors are packed into it. Reduced gradients
/// stay there until they are dropped. Takes effect with the next forward. Throws Error where a unit
/// has an all-gather or a reduce-scatter of its own, as these setters do where this is set.
void set_allocate_memory_from_process_group_for_comm(nn::ModuleBase& module, bool allocate,
                                                     bool recurse = true);

/// The gathers of the next forward wait for `event`, the end of the optimizer's update, instead of
/// for all that has been issued when it begins. For that forward only. `root`: the root.
///   const comm::StreamsPtr streams = comm::make_streams("cuda");
///   optimizer.step();
///   fsdp::set_post_optim_event(*model, streams->record(comm::Lane::kCompute));
/// Throws Error for a module that is no unit, or whose unit ran as part of another root.
void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event);

/// Lets several roots (the stages of a pipeline) use the same streams and buffers, and reduce one
/// unit at a time between them. Throws Error for a module that is no unit.
void share_context(const std::vector<nn::ModuleBase*>& roots);

}  // namespace tessera::fsdp
