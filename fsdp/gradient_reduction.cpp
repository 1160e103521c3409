#include "gradient_reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace tessera::fsdp {

GradientReduction::GradientReduction(std::vector<ShardedParameter*> parameters,
                                     const DeviceMesh& mesh, c10::ScalarType dtype)
    : parameters_(std::move(parameters)), rank_(mesh.local_rank()) {
  const c10::AutoGradMode no_grad(false);
  for (const ShardedParameter* parameter : parameters_) {
    gradients_.push_back(take_gradient(parameter->whole()));
  }
  if (mesh.size() > 1) {
    start(mesh, dtype);
  }
}

void GradientReduction::start(const DeviceMesh& mesh, c10::ScalarType dtype) {
  segments_ = segments_of(parameters_);
  std::vector<at::Tensor> whole;
  for (WholeGradient& gradient : gradients_) {
    whole.push_back(std::exchange(gradient.local, {}));
  }
  const auto options = parameters_.front()->shard().options().dtype(dtype);
  input_ = at::empty({mesh.size(), flat_numel(segments_)}, options);
  output_ = at::empty({flat_numel(segments_)}, options);
  pack(whole, segments_, input_);
  comm::Communicator& group = mesh.group();
  // NCCL divides while it reduces; elsewhere the shard is divided after.
  const bool averages = group.name() == "nccl";
  divisor_ = averages ? 1 : mesh.size();
  work_ = group.reduce_scatter(output_, input_, averages ? ReduceOp::kAvg : ReduceOp::kSum);
}

std::vector<at::Tensor> GradientReduction::shards() {
  std::vector<at::Tensor> shards;
  if (work_ == nullptr) {
    for (const WholeGradient& gradient : gradients_) {
      shards.push_back(gradient.local);
    }
    return shards;
  }
  std::exchange(work_, nullptr)->wait();
  input_.reset();
  if (divisor_ > 1) {
    output_.div_(divisor_);
  }
  for (const Segment& segment : segments_) {
    shards.push_back(shard_of(output_, segment, rank_));
  }
  return shards;
}

void GradientReduction::finish(DeferredSums& sums) {
  const c10::AutoGradMode no_grad(false);
  const std::vector<at::Tensor> means = shards();
  for (std::size_t i = 0; i < means.size(); ++i) {
    ShardedParameter& parameter = *parameters_[i];
    const at::Tensor mean = means[i].defined()
                                ? means[i]
                                : at::zeros(parameter.shard().sizes(), parameter.shard().options());
    if (gradients_[i].pending != nullptr) {
      sums.add(*gradients_[i].pending, mean,
               [&parameter](const at::Tensor& sum) { parameter.accumulate(sum); });
    } else {
      parameter.accumulate(mean);
    }
  }
}

}  // namespace tessera::fsdp
