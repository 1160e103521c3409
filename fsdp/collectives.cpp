#include "param_group.h"
#include "tessera/comm/detail/scopes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <bit>
#include <iterator>

#include "tessera/kernels/detail/lists.h"

namespace tessera::fsdp {

// CommContext limits the memory of a step. Only one unit's gradients are reduced at a time. A
// tensor is freed after the compute stream has waited for all readers.

using comm::Lane;

/// Only one reduction runs at a time, because unreduced gradients use the most memory of a step.
void CommContext::reduce(const std::vector<ParameterGroup*>& groups) {
  finish_reductions();
  free_retired();
  // Idle all-gather memory is freed before the reduction allocates memory.
  pool_.drop(Lane::kAllGather);
  for (ParameterGroup* group : groups) {
    group->gradients().start_reduce(*this);
    // start_reduce() can throw. `reducing_` gets only reductions that have started, because
    // finish_reductions() waits for all of `reducing_`.
    reducing_.push_back(&group->gradients());
  }
}

void CommContext::finish_reductions() {
  // reducing_ is emptied first, so that after an exception no later call finishes a reduction
  // twice.
  for (GradientState* gradients : std::exchange(reducing_, {})) {
    gradients->finish_reduce(*this);
  }
}

void CommContext::settle() {
  finish_reductions();
  // The optimizer runs on the compute stream, so the compute stream waits for the reductions.
  streams_->order(Lane::kReduceScatter, Lane::kCompute);
  // The pending sums of tensor parallelism (DeferredSums) read the reductions' results. So the sums
  // run later, on the compute stream.
  sums_.run();
  free_retired();
  pool_.clear();
  const auto on_host = std::exchange(on_host_, {});
  if (!on_host.empty()) {
    // An optimizer on the CPU reads offloaded gradients, so the CPU must wait too.
    streams_->synchronize(streams_->record(Lane::kCompute));
  }
  for (ShardedParameter* parameter : on_host) {
    parameter->arrive();
  }
}

void CommContext::forget(std::vector<ParameterGroup>& groups) {
  for (ParameterGroup& group : groups) {
    std::erase(reducing_, &group.gradients());
    for (const ShardedParameter& parameter : group.parameters()) {
      std::erase(on_host_, &parameter);
    }
    group.gradients().forget_reduction(*this);
  }
}

/// Keeps `tensors` alive until `event`. On a CPU there is no event and no other stream, so the
/// tensors are freed at once.
void CommContext::retire(std::vector<at::Tensor> tensors, comm::StreamEventPtr event) {
  if (event != nullptr && !tensors.empty()) {
    retired_.push_back({std::move(tensors), std::move(event)});
  }
}

void CommContext::free_retired() {
  for (const Retired& retired : std::exchange(retired_, {})) {
    streams_->wait(Lane::kCompute, retired.event);
  }
}

// GradientReduction reduces the gradients of a parameter group: reduce-scatter, all-reduce over
// replicas, division, addition to the shards' gradients. The reduction overlaps the backward of the
// next unit.

namespace {

/// Returns a power of two near the square root of the number of ranks. Dividing before and after an
/// fp16 sum limits both overflow and underflow, as in FSDP2.
double half_pre_divisor(std::int64_t ranks) {
  std::int64_t factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) {
    factor *= 2;
  }
  return static_cast<double>(factor);
}

/// Casts the gradients that have another dtype to `dtype`, into one common buffer. Skips undefined
/// gradients.
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

}  // namespace

GradientReduction::GradientReduction(std::vector<ShardedParameter*> parameters,
                                     std::vector<UnshardedGradient> gradients, const DataMesh& mesh,
                                     c10::ScalarType dtype, double divisor,
                                     std::shared_ptr<const Settings> settings, CommContext& context)
    : parameters_(std::move(parameters)),
      gradients_(std::move(gradients)),
      mesh_(mesh),
      dtype_(dtype),
      divisor_(divisor),
      settings_(std::move(settings)),
      all_reduce_(settings_->all_reduce),
      force_sum_(settings_->force_sum),
      hook_(settings_->all_reduce_hook) {
  // A pre-divisor that is a power of two adds no rounding error. Only fp16 has too little range
  // without a pre-divisor.
  if (dtype_ == at::kHalf && !force_sum_) {
    // If a user's divisor is smaller than half_pre_divisor(), the sum would need a multiplication
    // after the pre-division.
    pre_divisor_ = std::min(half_pre_divisor(mesh.ranks()), divisor_);
  }
  if (mesh_.ranks() == 1) {
    return;
  }
  op_ = averages() ? ReduceOp::kAvg : ReduceOp::kSum;
  const c10::AutoGradMode no_grad(false);
  std::vector<ShardShape> shapes;
  for (const ShardedParameter* parameter : parameters_) {
    shapes.push_back(parameter->shape());
  }
  segments_ = segments_of(shapes, dtype_);
  context.streams().note("reduce_scatter " + label());
  in_place() ? reduce_in_place(context) : reduce_packed(context);
}

/// Whether the reduce-scatter computes the average, which saves a pass over the result. The
/// division is exact only for a power of two ranks. Sums that are all-reduced later or passed to a
/// hook stay undivided.
bool GradientReduction::averages() const {
  const auto ranks = static_cast<std::uint64_t>(mesh_.shard.size());
  return !mesh_.replicate && !hook_ && !force_sum_ && pre_divisor_ == 1 &&
         divisor_ == static_cast<double>(ranks) && std::has_single_bit(ranks) &&
         mesh_.shard.group().averages_while_reducing();
}

/// Returns the name of this reduction for comm::PurposeScope. Ranks compare these names, so
/// different divisors cause an error.
std::string GradientReduction::purpose() const {
  if (op_ == ReduceOp::kAvg) {
    return label() + " (average)";
  }
  const bool late = dtype_ == at::kHalf && force_sum_;
  const bool usual = divisor_ == static_cast<double>(mesh_.ranks()) && !late;
  return usual ? label()
               : detail::concat(label(), " (divided by ", divisor_, late ? " after the sum)" : ")");
}

c10::TensorOptions GradientReduction::tensor_options() const {
  return at::dtype(dtype_).device(mesh_.device());
}

at::Tensor GradientReduction::shard(std::size_t index) const {
  return mesh_.ranks() == 1 ? gradients_[index].local
                            : shard_of(output_, segments_[index], mesh_.shard.local_rank());
}

/// Whether the reduce-scatter reads the unsharded gradients directly. Dimension 0 must divide
/// evenly over the ranks, so that no padding is needed.
bool GradientReduction::in_place() const {
  const bool even = std::ranges::all_of(segments_, [](const Segment& segment) {
    const ShardShape& shape = segment.shape;
    return shape.splits_rows() && shape.rows(shape.ranks - 1) == shape.chunk();
  });
  // A division before the sum needs packed gradients, because a division in place would change
  // tensors of the program.
  return even && pre_divisor_ == 1 && mesh_.shard.size() > 1 &&
         mesh_.shard.group().moves_groups_in_place();
}

void GradientReduction::reduce_in_place(CommContext& context) {
  std::vector<at::Tensor*> sent;
  for (UnshardedGradient& gradient : gradients_) {
    sent.push_back(&gradient.local);
  }
  cast_together(sent, dtype_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor gradient = std::exchange(gradients_[i].local, {});
    // Unpacked gradients have no other owner, so `held_` owns the gradients until the collective
    // has read them.
    held_.push_back(gradient.defined() ? gradient.contiguous()
                                       : at::zeros(segments_[i].shape.sizes, tensor_options()));
  }
  // The compute stream makes the gradients, so the reduce-scatter stream waits for the compute
  // stream. The result is allocated on the reduce-scatter stream.
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
    // This scope adds the unit's name to errors about ranks that call different collectives.
    const comm::PurposeScope scope(mesh_.shard.group(), purpose());
    work_ = mesh_.shard.group().reduce_scatter_group(outputs, inputs, op_);
  }
}

void GradientReduction::reduce_packed(CommContext& context) {
  std::vector<at::Tensor> unsharded;
  for (UnshardedGradient& gradient : gradients_) {
    unsharded.push_back(std::exchange(gradient.local, {}));
  }
  const std::int64_t ranks = mesh_.shard.size();
  const std::int64_t numel = flat_numel(segments_);
  if (ranks == 1) {  // replicate() uses all-reduce without reduce-scatter
    context.streams().order(Lane::kCompute, Lane::kReduceScatter);
    const comm::LaneScope lane(context.streams(), Lane::kReduceScatter);
    // The parameters' gradients become views of output_, so output_ is not from the pool.
    output_ = at::empty({numel}, tensor_options());
    pack_divided(unsharded, output_.view({1, numel}));
    held_ = std::move(unsharded);
    work_ = start_all_reduce();
    return;
  }
  buffer_ = context.pool().acquire(ranks * numel, dtype_, Lane::kCompute);
  const at::Tensor input = buffer_->tensor.view({ranks, numel});
  pack_divided(unsharded, input);
  context.streams().order(Lane::kCompute, Lane::kReduceScatter);
  const comm::LaneScope lane(context.streams(), Lane::kReduceScatter);
  output_ = at::empty({numel}, tensor_options());
  const comm::PurposeScope scope(mesh_.shard.group(), purpose());
  work_ = mesh_.shard.group().reduce_scatter(output_, input, op_);
}

void GradientReduction::pack_divided(const std::vector<at::Tensor>& gradients,
                                     const at::Tensor& packed) const {
  pack(gradients, segments_, packed);
  if (pre_divisor_ != 1) {
    packed.div_(pre_divisor_);
  }
}

void GradientReduction::wait(CommContext& context) {
  if (work_ != nullptr) {
    std::exchange(work_, nullptr)->wait();
  }
  const comm::StreamEventPtr event = context.streams().record(Lane::kReduceScatter);
  // On a GPU the pool reuses buffer_ only after `event`, because the collective reads buffer_.
  if (buffer_ && event != nullptr) {
    context.pool().release(*std::move(buffer_), event);
  }
  // On a CPU `event` is null. The packed buffer is freed, because an idle buffer in the pool would
  // raise the memory peak.
  buffer_.reset();
  context.retire(std::exchange(held_, {}), event);
}

/// If this reduction all-reduces over replicas, adds the stored sums of earlier reductions.
/// Otherwise stores its sum for a later reduction.
void GradientReduction::join_earlier() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!all_reduce_) {
      parameters_[i]->leave_to_replicas(
          {shard(i), gradients_[i].pending, gradients_[i].used, pre_divisor_}, dtype_);
      continue;
    }
    const UnshardedGradient earlier = parameters_[i]->take_left_to_replicas();
    gradients_[i].used |= earlier.used;
    if (!earlier.local.defined()) {
      continue;
    }
    // `earlier` can have another pre-divisor, because the program can change the settings between
    // micro-batches.
    const double factor = earlier.divisor / pre_divisor_;
    if (mesh_.ranks() == 1) {
      // Not in place: the user's hooks can reference autograd's tensor.
      gradients_[i].local = gradients_[i].local.add(earlier.local, factor);
    } else {
      shard(i).add_(earlier.local, factor);
    }
  }
}

comm::WorkPtr GradientReduction::start_all_reduce() {
  join_earlier();
  if (!all_reduce_) {
    return nullptr;
  }
  comm::Communicator& group = mesh_.replicate.group();
  const comm::PurposeScope scope(group, purpose());
  return group.all_reduce(output_, ReduceOp::kSum);
}

bool GradientReduction::reduce_over_replicas() {
  if (!mesh_.replicate) {
    return true;
  }
  if (mesh_.replicas() == 1) {
    // The sums of micro-batches are added in reduce_dtype even with one replica, so that the result
    // does not depend on the number of replicas.
    join_earlier();
    // If the shard dimension has one rank, reduce_packed() has started the all-reduce, and wait()
    // has waited for it.
  } else if (mesh_.shard.size() > 1) {
    if (const comm::WorkPtr work = start_all_reduce()) {
      work->wait();
    }
  }
  return all_reduce_;
}

void GradientReduction::finish(CommContext& context) {
  const c10::AutoGradMode no_grad(false);
  if (mesh_.ranks() == 1) {
    convert_alone();
    if (reduce_over_replicas()) {
      hand_out_alone(context);
    }
    return;
  }
  const comm::LaneScope lane(context.streams(), Lane::kReduceScatter);
  wait(context);
  if (reduce_over_replicas()) {
    hand_out_reduced(context);
  }
}

void GradientReduction::hand_out_reduced(CommContext& context) {
  if (hook_) {
    hook_(output_);
  }
  // The all-reduce hook must receive undivided sums, so the division follows the hook.
  if (op_ == ReduceOp::kSum && divisor_ != pre_divisor_) {
    output_.div_(divisor_ / pre_divisor_);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hand_out(i, shard(i), context);
  }
}

/// Casts `gradients`, on a GPU into one buffer. On a CPU, one buffer would change the order in
/// which a gradient norm is summed.
void GradientReduction::cast_alone(std::vector<at::Tensor*> gradients, c10::ScalarType dtype) {
  if (!mesh_.device().is_cpu()) {
    cast_together(gradients, dtype);
    return;
  }
  for (at::Tensor* gradient : gradients) {
    *gradient = gradient->to(dtype);
  }
}

/// Prepares the gradients on a mesh of one rank, where no reduction is needed: casts the gradients
/// to reduce_dtype, as with more ranks, and makes zeros for undefined gradients.
void GradientReduction::convert_alone() {
  std::vector<at::Tensor*> defined;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = gradients_[i].local;
    if (gradient.defined()) {
      defined.push_back(&gradient);
    } else {
      gradient = at::zeros(parameters_[i]->shape().sizes, tensor_options());
    }
  }
  cast_alone(std::move(defined), dtype_);
}

void GradientReduction::hand_out_alone(CommContext& context) {
  std::vector<at::Tensor*> complete;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = gradients_[i].local;
    if (hook_) {
      hook_(gradient);
    }
    if (divisor_ != 1) {
      // Not in place: the user's hooks can reference autograd's tensor.
      gradient = gradient.div(divisor_);
    }
    // `complete` excludes gradients that still wait for an addition, a copy to pinned memory or a
    // tensor-parallel sum.
    if (!parameters_[i]->gradient().defined() && !parameters_[i]->home().pinned &&
        gradients_[i].pending == nullptr) {
      complete.push_back(&gradient);
    }
  }
  cast_alone(std::move(complete), parameters_.front()->dtype());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hand_out(i, gradients_[i].local, context);
  }
}

void GradientReduction::hand_out(std::size_t index, const at::Tensor& gradient,
                                 CommContext& context) {
  ShardedParameter& parameter = *parameters_[index];
  const bool used = gradients_[index].used;
  if (!used && parameter.holders().size() == 1) {
    parameter.skip_unused();
    return;
  }
  if (parameter.home().offloaded) {
    context.expect_on_host(parameter);
  }
  // CommContext::settle computes tensor-parallel sums for many parameters together. Sums stay in
  // `output_`, because optimizers update adjacent gradients as one tensor. On one rank, sums are
  // cloned, because hooks can reference autograd's tensor.
  if (gradients_[index].pending != nullptr) {
    context.sums().add(
        *gradients_[index].pending, gradient,
        [&parameter, used,
         place = output_.defined() ? gradient : at::Tensor()](const at::Tensor& sum) {
          parameter.accumulate(place.defined() ? place.copy_(sum) : sum.clone(), used);
        },
        &parameter);
  } else {
    parameter.accumulate(gradient, used);
  }
}

// agree_on_calls(), free_outdated() and agree_on_use() exchange a few bytes of CPU memory. Every
// rank must call these functions in the same order, even after an error; otherwise other ranks wait
// forever.

namespace {

using Groups = std::vector<comm::Communicator*>;

void append_by_size(Groups& order, Groups groups) {
  // The sort is stable: process groups of equal size stay in the order of the modules, which is the
  // same on all ranks.
  std::ranges::stable_sort(groups, {}, &comm::Communicator::size);
  for (comm::Communicator* group : groups) {
    if (std::ranges::find(order, group) == order.end()) {
      order.push_back(group);
    }
  }
}

/// Sets each flag to its maximum over the ranks of `group`. Collective.
void set_where_any_rank_has(std::vector<std::uint8_t>& flags, comm::Communicator& group,
                            const char* what) {
  const comm::PurposeScope purpose(group, what);
  group.any_rank(flags);
}

}  // namespace

void agree_on_calls(const Groups& sharding, const Groups& replicating) {
  Groups groups;
  append_by_size(groups, sharding);
  append_by_size(groups, replicating);
  std::string found;
  for (comm::Communicator* group : groups) {
    try {
      group->agree_on_calls(found);
    } catch (const comm::PeerError&) {
      // The Error from an earlier process group is the cause. A PeerError only reports that another
      // rank has stopped.
      if (found.empty()) {
        throw;
      }
      break;
    } catch (const Error& error) {
      if (found.empty()) {
        found = error.what();
      }
    }
  }
  TESSERA_CHECK(found.empty(), found, kCallOnEveryRank);
}

void free_outdated(std::vector<ParameterGroup*> groups, CommContext& context) {
  while (!groups.empty()) {
    const DeviceMesh mesh = groups.front()->mesh().shard;
    // Meshes are visited in the order of the modules' parameter groups, which is equal on all
    // ranks.
    const auto others = std::stable_partition(
        groups.begin(), groups.end(),
        [&](const ParameterGroup* group) { return group->mesh().shard == mesh; });
    const std::vector<ParameterGroup*> same(groups.begin(), others);
    groups.erase(groups.begin(), others);
    std::vector<std::uint8_t> outdated;
    for (const ParameterGroup* group : same) {
      outdated.push_back(group->gathered().is_current() ? 0 : 1);
    }
    if (mesh.size() > 1) {
      set_where_any_rank_has(outdated, mesh.group(), "outdated gathered parameters");
    }
    for (std::size_t i = 0; i < same.size(); ++i) {
      if (outdated[i] != 0) {
        same[i]->gathered().reshard(context);
      }
    }
  }
}

void agree_on_use(const std::vector<ParameterGroup*>& groups) {
  // Each mesh, with the parameters on this mesh in the order of the modules.
  std::vector<std::pair<DeviceMesh, std::vector<ShardedParameter*>>> peers;
  for (ParameterGroup* group : groups) {
    // A rank can have run a unit that this rank skipped. So `peers` also gets parameters without a
    // reduction on this rank.
    for (ShardedParameter& parameter : group->parameters()) {
      const DeviceMesh& mesh = parameter.holders();
      auto found = std::ranges::find(peers, mesh, &decltype(peers)::value_type::first);
      if (found == peers.end()) {
        found = peers.insert(found, {mesh, {}});
      }
      found->second.push_back(&parameter);
    }
  }
  for (const auto& [mesh, parameters] : peers) {
    std::vector<std::uint8_t> flags;
    for (ShardedParameter* parameter : parameters) {
      flags.push_back(parameter->used() ? 1 : 0);
      std::ranges::copy(parameter->partial_group().flags(), std::back_inserter(flags));
    }
    for (int dim = 0; dim < mesh.ndim(); ++dim) {
      if (mesh.size(dim) > 1) {
        set_where_any_rank_has(flags, mesh.group(dim), "the parameters in use");
      }
    }
    std::span<const std::uint8_t> rest = flags;
    for (ShardedParameter* parameter : parameters) {
      const bool used = rest.front() != 0;
      PartialGradGroup& sum = parameter->partial_group();
      const std::size_t count = sum.flags().size();
      parameter->settle_use(used);
      // If no rank used the parameter, the ranks choose the process group of its sum in a later
      // call.
      if (used && count > 0) {
        sum.agree(rest.subspan(1, count));
      }
      rest = rest.subspan(1 + count);
    }
  }
}

}  // namespace tessera::fsdp
