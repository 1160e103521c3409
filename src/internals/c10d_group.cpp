#include "tessera/internals/detail/c10d_group.h"

namespace tessera::detail {

GroupWorkPtr start_all_gather(Group& group, at::Tensor output, at::Tensor input) {
  return group._allgather_base(output, input);
}

GroupWorkPtr start_all_gather(Group& group, std::vector<at::Tensor> outputs,
                              std::vector<at::Tensor> inputs) {
  return group.allgather_into_tensor_coalesced(outputs, inputs);
}

GroupWorkPtr start_all_reduce(Group& group, const at::Tensor& tensor, GroupReduceOp op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  return group.allreduce(tensors, options);
}

GroupWorkPtr start_reduce_scatter(Group& group, at::Tensor output, at::Tensor input,
                                  GroupReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  return group._reduce_scatter_base(output, input, options);
}

GroupWorkPtr start_reduce_scatter(Group& group, std::vector<at::Tensor> outputs,
                                  std::vector<at::Tensor> inputs, GroupReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

GroupWorkPtr start_all_to_all(Group& group, at::Tensor output, at::Tensor input,
                              std::vector<std::int64_t> output_counts,
                              std::vector<std::int64_t> input_counts) {
  return group.alltoall_base(output, input, output_counts, input_counts);
}

GroupWorkPtr start_broadcast(Group& group, const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return group.broadcast(tensors, options);
}

GroupWorkPtr start_barrier(Group& group) {
  return group.barrier();
}

}  // namespace tessera::detail
