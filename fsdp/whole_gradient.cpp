#include "whole_gradient.h"

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::fsdp {
namespace {

/// The group over which a gradient lying as `from` is to be summed to lie as `to`, if that is all
/// that is missing.
comm::Communicator* pending_sum(const ShardingSpec& from, const ShardingSpec& to) {
  const std::vector<PartialDim>& partial = from.layout->partial();
  const bool only_sum = partial.size() == 1 && partial[0].op == ReduceOp::kSum &&
                        Layout::intern(from.layout->mesh_sizes(), from.layout->dims()) == to.layout;
  return only_sum ? &from.mesh.group(partial[0].mesh_dim) : nullptr;
}

}  // namespace

WholeGradient take_gradient(const at::Tensor& whole) {
  const at::Tensor gradient = whole.grad();
  whole.mutable_grad().reset();
  if (!gradient.defined() || !tessera::is_distributed(whole)) {
    return {gradient, nullptr};
  }
  TESSERA_CHECK(tessera::is_distributed(gradient),
                "the gradient of a distributed parameter arrived as a plain tensor");
  const ShardingSpec& from = sharding_spec(gradient);
  const ShardingSpec& to = sharding_spec(whole);
  if (from.layout == to.layout) {
    return {local_tensor(gradient), nullptr};
  }
  if (comm::Communicator* group = pending_sum(from, to)) {
    return {local_tensor(gradient), group};
  }
  return {local_tensor(DistributedTensor(gradient).redistribute(to.layout)), nullptr};
}

void add_gradient(WholeGradient& sum, const WholeGradient& gradient, c10::ScalarType dtype) {
  if (!gradient.local.defined()) {
    return;
  }
  if (!sum.local.defined()) {
    sum = {gradient.local.to(dtype), gradient.pending};
    return;
  }
  TESSERA_CHECK(sum.pending == gradient.pending,
                "the gradient of a parameter is a pending sum over tensor parallelism in one "
                "backward and complete in another; accumulate it with gradient sync on");
  sum.local.add_(gradient.local);
}

}  // namespace tessera::fsdp
