#include "gradient_reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace tessera::fsdp {

GradientReduction::GradientReduction(std::vector<ShardedParameter*> parameters,
                                     std::vector<WholeGradient> gradients, const DataMesh& mesh,
                                     c10::ScalarType dtype, double divisor)
    : parameters_(std::move(parameters)),
      gradients_(std::move(gradients)),
      rank_(mesh.shard.local_rank()),
      divisor_(divisor) {
  const c10::AutoGradMode no_grad(false);
  if (mesh.ranks() > 1) {
    start(mesh, dtype);
  }
}

void GradientReduction::start(const DataMesh& mesh, c10::ScalarType dtype) {
  segments_ = segments_of(parameters_);
  std::vector<at::Tensor> whole;
  for (WholeGradient& gradient : gradients_) {
    whole.push_back(std::exchange(gradient.local, {}));
  }
  const auto options = at::dtype(dtype).device(mesh.device());
  input_ = at::empty({mesh.shard.size(), flat_numel(segments_)}, options);
  pack(whole, segments_, input_);
  if (mesh.replicas() > 1) {
    replicas_ = &mesh.replicate.group();
  }
  if (mesh.shard.size() == 1) {
    output_ = input_.view({-1});
    return;
  }
  output_ = at::empty({flat_numel(segments_)}, options);
  work_ = mesh.shard.group().reduce_scatter(output_, input_, ReduceOp::kSum);
}

void GradientReduction::wait() {
  if (work_ != nullptr) {
    std::exchange(work_, nullptr)->wait();
  }
  input_.reset();
  if (replicas_ != nullptr) {
    replicas_->all_reduce(output_, ReduceOp::kSum)->wait();
  }
  if (divisor_ != 1) {
    output_.div_(divisor_);
  }
}

std::vector<at::Tensor> GradientReduction::shards() {
  std::vector<at::Tensor> shards;
  if (!output_.defined()) {
    for (const WholeGradient& gradient : gradients_) {
      const bool divide = divisor_ != 1 && gradient.local.defined();
      shards.push_back(divide ? gradient.local.div(divisor_) : gradient.local);
    }
    return shards;
  }
  wait();
  for (const Segment& segment : segments_) {
    shards.push_back(shard_of(output_, segment, rank_));
  }
  return shards;
}

void GradientReduction::finish(DeferredSums& sums) {
  const c10::AutoGradMode no_grad(false);
  const std::vector<at::Tensor> reduced = shards();
  for (std::size_t i = 0; i < reduced.size(); ++i) {
    ShardedParameter& parameter = *parameters_[i];
    const at::Tensor value =
        reduced[i].defined() ? reduced[i]
                             : at::zeros(parameter.shard().sizes(), parameter.shard().options());
    if (gradients_[i].pending != nullptr) {
      sums.add(*gradients_[i].pending, value,
               [&parameter](const at::Tensor& sum) { parameter.accumulate(sum); });
    } else {
      parameter.accumulate(value);
    }
  }
}

}  // namespace tessera::fsdp
