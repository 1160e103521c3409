#include "gradient_reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace tessera::fsdp {
namespace {

using comm::Lane;

/// About the square root of the ranks, a power of two: with gradients divided by it before a sum in
/// fp16 and by the rest after, neither overflows nor underflows much. FSDP2's rule.
double half_pre_divisor(std::int64_t ranks) {
  std::int64_t factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) {
    factor *= 2;
  }
  return static_cast<double>(factor);
}

/// What is issued within goes to a hook's lane, on `gradients` of the lane `owner`.
class HookScope {
 public:
  HookScope(Communication& communication, Lane lane, Lane owner, std::vector<at::Tensor> gradients)
      : communication_(communication),
        lane_(lane),
        owner_(owner),
        gradients_(std::move(gradients)),
        scope_(communication.streams(), lane) {
    communication.streams().order(owner, lane);
  }
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope() {
    communication_.await_hook(std::move(gradients_), owner_,
                              communication_.streams().record(lane_));
  }

 private:
  Communication& communication_;
  Lane lane_;
  Lane owner_;
  std::vector<at::Tensor> gradients_;
  comm::LaneScope scope_;
};

std::vector<at::Tensor> locals_of(const std::vector<WholeGradient>& gradients) {
  std::vector<at::Tensor> locals;
  for (const WholeGradient& gradient : gradients) {
    locals.push_back(gradient.local);
  }
  return locals;
}

}  // namespace

GradientReduction::GradientReduction(std::vector<ShardedParameter*> parameters,
                                     std::vector<WholeGradient> gradients, const DataMesh& mesh,
                                     ReductionOptions options, Communication& communication)
    : parameters_(std::move(parameters)),
      gradients_(std::move(gradients)),
      mesh_(mesh),
      options_(std::move(options)) {
  if (options_.dtype == at::kHalf && !options_.force_sum) {
    pre_divisor_ = std::min(half_pre_divisor(mesh.ranks()), options_.divisor);
  }
  if (mesh_.ranks() > 1) {
    start(communication);
  }
}

c10::TensorOptions GradientReduction::tensor_options() const {
  return at::dtype(options_.dtype).device(mesh_.device());
}

at::Tensor GradientReduction::shard(std::size_t index) const {
  return shard_of(output_, segments_[index], mesh_.shard.local_rank());
}

/// Rows that divide lie in the whole gradient as the ranks' shards do, one after another.
bool GradientReduction::in_place() const {
  const bool even = std::ranges::all_of(segments_, [](const Segment& segment) {
    const ShardShape& shape = segment.shape;
    return shape.dim == std::int64_t{0} && shape.rows(shape.ranks - 1) == shape.chunk();
  });
  return even && pre_divisor_ == 1 && mesh_.shard.size() > 1 &&
         !options_.hooks->packs_reductions() && mesh_.shard.group().moves_groups_in_place();
}

void GradientReduction::start(Communication& communication) {
  const c10::AutoGradMode no_grad(false);
  segments_ = segments_of(parameters_);
  communication.streams().note("reduce_scatter " + options_.label);
  in_place() ? reduce_in_place(communication) : reduce_packed(communication);
}

void GradientReduction::reduce_in_place(Communication& communication) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor gradient = std::exchange(gradients_[i].local, {});
    held_.push_back(gradient.defined() ? gradient.to(options_.dtype).contiguous()
                                       : at::zeros(segments_[i].shape.sizes, tensor_options()));
  }
  communication.streams().order(Lane::kCompute, Lane::kReduceScatter);
  const comm::LaneScope lane(communication.streams(), Lane::kReduceScatter);
  output_ = at::empty({flat_numel(segments_)}, tensor_options());
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (held_[i].numel() > 0) {
      inputs.push_back(held_[i]);
      outputs.push_back(shard(i));
    }
  }
  if (!inputs.empty()) {
    const comm::PurposeScope purpose(mesh_.shard.group(), options_.label);
    work_ = mesh_.shard.group().reduce_scatter_group(outputs, inputs, ReduceOp::kSum);
  }
}

void GradientReduction::reduce_packed(Communication& communication) {
  std::vector<at::Tensor> whole;
  for (WholeGradient& gradient : gradients_) {
    whole.push_back(std::exchange(gradient.local, {}));
  }
  const std::int64_t ranks = mesh_.shard.size();
  const std::int64_t numel = flat_numel(segments_);
  comm::Communicator& group = (ranks > 1 ? mesh_.shard : mesh_.replicate).group();
  const MemorySource memory = options_.hooks->reduction_memory(group);
  buffer_ = communication.pool().acquire(ranks * numel, options_.dtype, Lane::kCompute, memory);
  const at::Tensor input = buffer_->tensor.view({ranks, numel});
  pack(whole, segments_, input);
  if (pre_divisor_ != 1) {
    input.div_(pre_divisor_);
  }
  communication.streams().order(Lane::kCompute, Lane::kReduceScatter);
  const comm::LaneScope lane(communication.streams(), Lane::kReduceScatter);
  output_ = memory.allocate(numel, tensor_options());
  if (ranks == 1) {
    output_.copy_(input.view({numel}));
    work_ = start_all_reduce();
    return;
  }
  const comm::PurposeScope purpose(group, options_.label);
  work_ = options_.hooks->reduce_scatter ? options_.hooks->reduce_scatter(group, output_, input)
                                         : group.reduce_scatter(output_, input, ReduceOp::kSum);
}

void GradientReduction::wait(Communication& communication) {
  if (work_ != nullptr) {
    std::exchange(work_, nullptr)->wait();
  }
  const comm::StreamEventPtr event = communication.streams().record(Lane::kReduceScatter);
  if (buffer_ && event != nullptr) {
    communication.pool().release(*std::move(buffer_), event);
  }
  // Where nothing need be waited for it is freed: idle while the next unit computes, it would add
  // to the peak.
  buffer_.reset();
  communication.retire(std::exchange(held_, {}), event);
}

/// Adds what earlier reductions left to the replicas, or leaves this one's with it.
void GradientReduction::join_earlier() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    WholeGradient& earlier = parameters_[i]->unreduced();
    WholeGradient sum{shard(i), gradients_[i].pending};
    if (!options_.all_reduce) {
      if (sum.pending == nullptr) {
        sum.pending = earlier.pending;  // this micro-batch did not use the parameter
      }
      add_gradient(earlier, sum, options_.dtype);
    } else if (earlier.local.defined()) {
      sum.local.add_(std::exchange(earlier.local, {}));
      gradients_[i].pending = sum.pending != nullptr ? sum.pending : earlier.pending;
      earlier.pending = nullptr;
    }
  }
}

comm::WorkPtr GradientReduction::start_all_reduce() {
  join_earlier();
  if (!options_.all_reduce) {
    return nullptr;
  }
  comm::Communicator& group = mesh_.replicate.group();
  const comm::PurposeScope purpose(group, options_.label);
  return group.all_reduce(output_, ReduceOp::kSum);
}

bool GradientReduction::reduce_over_replicas() {
  if (mesh_.replicas() == 1) {
    return true;
  }
  if (mesh_.shard.size() > 1) {
    if (const comm::WorkPtr work = start_all_reduce()) {
      work->wait();
    }
  }
  return options_.all_reduce;
}

void GradientReduction::finish(Communication& communication) {
  const c10::AutoGradMode no_grad(false);
  const std::optional<Lane> hook_lane = options_.hooks->all_reduce_lane;
  if (mesh_.ranks() == 1) {
    std::optional<HookScope> scope;
    if (hook_lane) {
      scope.emplace(communication, *hook_lane, Lane::kCompute, locals_of(gradients_));
    }
    hand_out_alone(communication);
    return;
  }
  {
    const comm::LaneScope lane(communication.streams(), Lane::kReduceScatter);
    wait(communication);
    if (!reduce_over_replicas()) {
      return;
    }
    if (!hook_lane) {
      hand_out_reduced(communication);
      return;
    }
  }
  const HookScope scope(communication, *hook_lane, Lane::kReduceScatter, {output_});
  hand_out_reduced(communication);
}

void GradientReduction::hand_out_reduced(Communication& communication) {
  if (options_.hooks->all_reduce) {
    options_.hooks->all_reduce(output_);
  }
  if (options_.divisor != pre_divisor_) {
    output_.div_(options_.divisor / pre_divisor_);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hand_out(i, shard(i), communication);
  }
}

void GradientReduction::hand_out_alone(Communication& communication) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor gradient = gradients_[i].local;
    if (!gradient.defined()) {
      gradient = at::zeros(parameters_[i]->shape().sizes, tensor_options());
    } else if (options_.divisor != 1) {
      gradient = gradient.div(options_.divisor);
    }
    if (options_.hooks->all_reduce) {
      options_.hooks->all_reduce(gradient);
    }
    hand_out(i, gradient, communication);
  }
}

void GradientReduction::hand_out(std::size_t index, const at::Tensor& gradient,
                                 Communication& communication) {
  ShardedParameter& parameter = *parameters_[index];
  if (parameter.home().device != mesh_.device()) {
    communication.expect_host_reads();
  }
  if (gradients_[index].pending != nullptr) {
    communication.sums().add(
        *gradients_[index].pending, gradient,
        [&parameter](const at::Tensor& sum) { parameter.accumulate(sum); }, &parameter);
  } else {
    parameter.accumulate(gradient);
  }
}

}  // namespace tessera::fsdp
