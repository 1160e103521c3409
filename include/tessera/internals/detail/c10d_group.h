// c10d's process groups, as Gloo's and NCCL's are alike: tensors in, a Work out. As with stores,
// documented for Python alone, where torch.distributed calls them by an operator of the dispatcher.
//
// No version differs in what is used. Some of these functions may get other names: of 2.15 the
// headers have both.
//
// Canary: C10dGroupCanary, on Gloo.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

using Group = c10d::Backend;
using GroupPtr = c10::intrusive_ptr<Group>;

/// wait(time) throws where that is over, as where the operation has failed; isCompleted() tells.
using GroupWork = c10d::Work;
using GroupWorkPtr = c10::intrusive_ptr<GroupWork>;

using GroupReduceOp = c10d::ReduceOp;

// Each is collective, and keeps its tensors until the work is done.

GroupWorkPtr start_all_gather(Group& group, at::Tensor output, at::Tensor input);
GroupWorkPtr start_all_gather(Group& group, std::vector<at::Tensor> outputs,
                              std::vector<at::Tensor> inputs);
GroupWorkPtr start_all_reduce(Group& group, const at::Tensor& tensor, GroupReduceOp op);
GroupWorkPtr start_reduce_scatter(Group& group, at::Tensor output, at::Tensor input,
                                  GroupReduceOp op);
GroupWorkPtr start_reduce_scatter(Group& group, std::vector<at::Tensor> outputs,
                                  std::vector<at::Tensor> inputs, GroupReduceOp op);
/// Counts of elements of the first dimension.
GroupWorkPtr start_all_to_all(Group& group, at::Tensor output, at::Tensor input,
                              std::vector<std::int64_t> output_counts,
                              std::vector<std::int64_t> input_counts);
GroupWorkPtr start_broadcast(Group& group, const at::Tensor& tensor, int root);
GroupWorkPtr start_barrier(Group& group);

}  // namespace tessera::detail
TESSERA_API_END
