// The reduction of a group's gradients: reduce-scatter over the ranks that shard, all-reduce over
// replicas, division, and the hand-over to the sharded parameters. It starts when backward leaves
// the unit, and finish() comes one unit later (CommContext::reduce), so that the collective runs
// beside the next unit's backward.

#include "parameter_group/gradient_reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "parameter_group/unsharded_tensors.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/kernels/detail/pack.h"

namespace tessera::fsdp {
namespace {

using comm::Lane;

/// About the square root of the ranks, a power of two: with gradients divided by it before a sum in
/// fp16 and by the rest after, neither overflows nor underflows much. FSDP2's rule.
double half_pre_divisor(std::int64_t ranks) {
  std::int64_t factor = 1;
  // Only powers of two that divide the number of ranks, so that 12 ranks give 4 (then 3).
  while (ranks % factor == 0 && ranks / factor > factor) {
    factor *= 2;
  }
  return static_cast<double>(factor);
}

/// Work within this scope goes to a hook's lane and uses `gradients` of the lane `owner`.
class HookScope {
 public:
  HookScope(CommContext& context, Lane lane, Lane owner, std::vector<at::Tensor> gradients)
      : comm_context_(context),
        lane_(lane),
        owner_(owner),
        gradients_(std::move(gradients)),
        scope_(context.streams(), lane) {
    context.streams().order(owner, lane);
  }
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope() {
    comm_context_.await_hook(std::move(gradients_), owner_, comm_context_.streams().record(lane_));
  }

 private:
  CommContext& comm_context_;
  Lane lane_;
  Lane owner_;
  std::vector<at::Tensor> gradients_;
  comm::LaneScope scope_;
};

/// Casts those of `gradients` that are of another type than `dtype`, into one buffer. Undefined
/// ones stay so.
void cast_together(const std::vector<at::Tensor*>& gradients, c10::ScalarType dtype) {
  const auto step = kTensorAlignment / static_cast<std::int64_t>(c10::elementSize(dtype));
  std::vector<at::Tensor*> others;
  std::int64_t numel = 0;
  for (at::Tensor* gradient : gradients) {
    if (gradient->defined() && gradient->scalar_type() != dtype) {
      others.push_back(gradient);
      numel += detail::round_up(gradient->numel(), step);
    }
  }
  if (others.empty()) {
    return;
  }
  const at::Tensor buffer = at::empty({numel}, others.front()->options().dtype(dtype));
  std::vector<at::Tensor> from, to;
  numel = 0;
  for (at::Tensor* gradient : others) {
    from.push_back(*gradient);
    to.push_back(buffer.narrow(0, numel, gradient->numel()).view(gradient->sizes()));
    numel += detail::round_up(gradient->numel(), step);
    *gradient = to.back();
  }
  kernels::copy_all(to, from);
}

std::vector<at::Tensor> locals_of(const std::vector<UnshardedGradient>& gradients) {
  std::vector<at::Tensor> locals;
  for (const UnshardedGradient& gradient : gradients) {
    locals.push_back(gradient.local);
  }
  return locals;
}

}  // namespace

GradientReduction::GradientReduction(std::vector<ShardedParameter*> parameters,
                                     std::vector<UnshardedGradient> gradients, const DataMesh& mesh,
                                     ReductionOptions options, CommContext& context)
    : parameters_(std::move(parameters)),
      gradients_(std::move(gradients)),
      mesh_(mesh),
      options_(std::move(options)) {
  // A power of two, so that dividing twice rounds as dividing once. Other types have range enough.
  if (options_.dtype == at::kHalf && !options_.force_sum) {
    // A set divisor may be smaller than the factor, even 1: dividing by more first would mean to
    // multiply after.
    pre_divisor_ = std::min(half_pre_divisor(mesh.ranks()), options_.divisor);
  }
  // One rank sends nothing: finish() hands its gradients out.
  if (mesh_.ranks() > 1) {
    start(context);
  }
}

c10::TensorOptions GradientReduction::tensor_options() const {
  return at::dtype(options_.dtype).device(mesh_.device());
}

at::Tensor GradientReduction::shard(std::size_t index) const {
  return shard_of(output_, segments_[index], mesh_.shard.local_rank());
}

/// With rows that divide evenly, the unsharded gradient is already what a reduce-scatter takes: the
/// ranks' shards, one after another.
bool GradientReduction::in_place() const {
  const bool even = std::ranges::all_of(segments_, [](const Segment& segment) {
    const ShardShape& shape = segment.shape;
    return shape.splits_rows() && shape.rows(shape.ranks - 1) == shape.chunk();
  });
  // A pre-divisor would have to be applied to autograd's own tensors, which others may hold.
  return even && pre_divisor_ == 1 && mesh_.shard.size() > 1 && !hooks().packs_reductions() &&
         mesh_.shard.group().moves_groups_in_place();
}

void GradientReduction::start(CommContext& context) {
  const c10::AutoGradMode no_grad(false);
  std::vector<ShardShape> shapes;
  for (const ShardedParameter* parameter : parameters_) {
    shapes.push_back(parameter->shape());
  }
  segments_ = segments_of(shapes, options_.dtype);
  context.streams().begin_unit(Lane::kReduceScatter, label());
  in_place() ? reduce_in_place(context) : reduce_packed(context);
}

void GradientReduction::reduce_in_place(CommContext& context) {
  std::vector<at::Tensor*> sent;
  for (UnshardedGradient& gradient : gradients_) {
    sent.push_back(&gradient.local);
  }
  cast_together(sent, options_.dtype);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor gradient = std::exchange(gradients_[i].local, {});
    // Kept until the collective has read them: without packing there is no other owner.
    held_.push_back(gradient.defined() ? gradient.contiguous()
                                       : at::zeros(segments_[i].shape.sizes, tensor_options()));
  }
  // Gradients are compute's; the result belongs to the lane that reduces, which allocates it.
  context.streams().order(Lane::kCompute, Lane::kReduceScatter);
  const comm::LaneScope lane(context.streams(), Lane::kReduceScatter);
  output_ = at::empty({flat_numel(segments_)}, tensor_options());
  clear_gaps(output_, segments_);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (held_[i].numel() > 0) {
      inputs.push_back(held_[i]);
      outputs.push_back(shard(i));
    }
  }
  if (!inputs.empty()) {
    // Errors about ranks that call different collectives name the unit.
    const comm::PurposeScope purpose(mesh_.shard.group(), label());
    work_ = mesh_.shard.group().reduce_scatter_group(outputs, inputs, ReduceOp::kSum);
  }
}

void GradientReduction::reduce_packed(CommContext& context) {
  std::vector<at::Tensor> unsharded;
  for (UnshardedGradient& gradient : gradients_) {
    unsharded.push_back(std::exchange(gradient.local, {}));
  }
  const std::int64_t ranks = mesh_.shard.size();
  const std::int64_t numel = flat_numel(segments_);
  // Where each rank alone shards (replicate), the packed gradients go to the all-reduce at once, in
  // memory of that group.
  comm::Communicator& group = (ranks > 1 ? mesh_.shard : mesh_.replicate).group();
  const MemorySource memory = hooks().reduction_memory(group);
  // Packed where autograd put them, in the compute lane.
  buffer_ = context.pool().acquire(ranks * numel, options_.dtype, Lane::kCompute, memory);
  const at::Tensor input = buffer_->tensor.view({ranks, numel});
  pack(unsharded, segments_, input);
  if (pre_divisor_ != 1) {
    input.div_(pre_divisor_);
  }
  context.streams().order(Lane::kCompute, Lane::kReduceScatter);
  const comm::LaneScope lane(context.streams(), Lane::kReduceScatter);
  output_ = memory.allocate(numel, tensor_options());
  if (ranks == 1) {
    // The buffer goes back to the pool; what is handed out are views of the output.
    output_.copy_(input.view({numel}));
    work_ = start_all_reduce();
    return;
  }
  const comm::PurposeScope purpose(group, label());
  work_ = hooks().reduce_scatter ? hooks().reduce_scatter(group, output_, input)
                                 : group.reduce_scatter(output_, input, ReduceOp::kSum);
}

void GradientReduction::wait(CommContext& context) {
  if (work_ != nullptr) {
    std::exchange(work_, nullptr)->wait();
  }
  const comm::StreamEventPtr event = context.streams().record(Lane::kReduceScatter);
  // With an event the buffer is busy a while longer, so that the pool keeps it for the next unit.
  if (buffer_ && event != nullptr) {
    context.pool().release(*std::move(buffer_), event);
  }
  // Without an event to wait for it is freed: an idle buffer would add to the peak while the next
  // unit computes.
  buffer_.reset();
  context.retire(std::exchange(held_, {}), event);
}

/// Adds the sums that earlier reductions left for the replicas, or leaves this sum with them.
void GradientReduction::join_earlier() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // Micro-batches before the last: sums over the ranks that shard are added up.
    if (!options_.all_reduce) {
      parameters_[i]->leave_to_replicas(
          {shard(i), gradients_[i].pending, gradients_[i].used, pre_divisor_}, options_.dtype);
      continue;
    }
    const UnshardedGradient earlier = parameters_[i]->take_left_to_replicas();
    gradients_[i].used |= earlier.used;
    if (earlier.local.defined()) {
      // The division may have been set otherwise meanwhile, or the type converted.
      shard(i).add_(earlier.local, earlier.divisor / pre_divisor_);
    }
  }
}

comm::WorkPtr GradientReduction::start_all_reduce() {
  join_earlier();
  if (!options_.all_reduce) {
    return nullptr;
  }
  comm::Communicator& group = mesh_.replicate.group();
  const comm::PurposeScope purpose(group, label());
  return group.all_reduce(output_, ReduceOp::kSum);
}

bool GradientReduction::reduce_over_replicas() {
  // The sum over the ranks that shard is the whole sum.
  if (mesh_.replicas() == 1) {
    return true;
  }
  // Without sharding, reduce_packed() has started the all-reduce, and wait() has waited for it.
  if (mesh_.shard.size() > 1) {
    if (const comm::WorkPtr work = start_all_reduce()) {
      work->wait();
    }
  }
  return options_.all_reduce;
}

void GradientReduction::finish(CommContext& context) {
  const c10::AutoGradMode no_grad(false);
  const std::optional<Lane> hook_lane = hooks().all_reduce_lane;
  if (mesh_.ranks() == 1) {
    std::optional<HookScope> scope;
    if (hook_lane) {
      scope.emplace(context, *hook_lane, Lane::kCompute, locals_of(gradients_));
    }
    hand_out_alone(context);
    return;
  }
  {
    const comm::LaneScope lane(context.streams(), Lane::kReduceScatter);
    wait(context);
    if (!reduce_over_replicas()) {
      return;
    }
    if (!hook_lane) {
      hand_out_reduced(context);
      return;
    }
  }
  // After the reduction's lane has been left: the hook's lane is then ordered behind it.
  const HookScope scope(context, *hook_lane, Lane::kReduceScatter, {output_});
  hand_out_reduced(context);
}

void GradientReduction::hand_out_reduced(CommContext& context) {
  if (hooks().all_reduce) {
    hooks().all_reduce(output_);
  }
  // After the hook, which sees sums.
  if (options_.divisor != pre_divisor_) {
    output_.div_(options_.divisor / pre_divisor_);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hand_out(i, shard(i), context);
  }
}

/// One rank: new gradients of another type than their parameters' are cast together. Not those that
/// are added to an earlier gradient or summed over tensor parallelism first, nor what a hook is to
/// see as autograd has made it.
void GradientReduction::cast_alone() {
  // On a CPU a launch costs nothing, and a norm of neighbours in memory is summed in another order.
  if (mesh_.device().is_cpu() || hooks().all_reduce || options_.divisor != 1) {
    return;
  }
  std::vector<at::Tensor*> first;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = *parameters_[i];
    if (!parameter.gradient().defined() && !parameter.home().pinned &&
        gradients_[i].pending == nullptr) {
      first.push_back(&gradients_[i].local);
    }
  }
  cast_together(first, parameters_.front()->dtype());
}

/// One rank: autograd's tensors themselves are the result, unless they are divided.
void GradientReduction::hand_out_alone(CommContext& context) {
  cast_alone();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor gradient = gradients_[i].local;
    if (!gradient.defined()) {
      gradient = at::zeros(parameters_[i]->shape().sizes, tensor_options());
    } else if (options_.divisor != 1) {
      // Not in place: hooks of the user may hold autograd's tensor.
      gradient = gradient.div(options_.divisor);
    }
    if (hooks().all_reduce) {
      hooks().all_reduce(gradient);
    }
    hand_out(i, gradient, context);
  }
}

void GradientReduction::hand_out(std::size_t index, const at::Tensor& gradient,
                                 CommContext& context) {
  ShardedParameter& parameter = *parameters_[index];
  // Peers get zeros for a parameter unused on this rank; UseAgreement asks whether any used it.
  const bool used = gradients_[index].used;
  if (parameter.home().offloaded) {
    context.expect_on_host(parameter);
  }
  // The sum over tensor parallelism is taken on shards, which are smaller, and in one all-reduce
  // with those of other parameters, when CommContext::settle runs the sums. The result is written
  // beside its neighbours' gradients, where a complete gradient is. Before the ranks have agreed
  // (PendingSum), complete ones take this path too; an optimizer that joins neighbours must then
  // join the same ones in the first step of a resumed run as in that step of an uninterrupted one.
  // Not written to autograd's tensor, which hooks of the user may hold.
  if (gradients_[index].pending != nullptr) {
    context.sums().add(
        *gradients_[index].pending, gradient,
        [&parameter, used,
         place = output_.defined() ? gradient : at::Tensor()](const at::Tensor& sum) {
          parameter.accumulate(place.defined() ? place.copy_(sum) : sum, used);
        },
        &parameter);
  } else {
    parameter.accumulate(gradient, used);
  }
}

}  // namespace tessera::fsdp
