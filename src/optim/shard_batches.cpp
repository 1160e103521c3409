// How SlotOptimizer hands shards to a list kernel.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "flat_runs.h"
#include "shard_states.h"
#include "tessera/optim/slot_optimizer.h"

namespace tessera::optim {
namespace {

at::Tensor joined(const at::Tensor& first, std::size_t count, std::int64_t numel) {
  return count == 1 ? first : flat_view(first, numel);
}

/// Lets autograd see that these have changed: the kernel wrote to them through a tensor of its own,
/// or is one of libtorch's fused kernels, which do not say so.
void mark_changed(std::span<const ShardUpdate> run) {
  for (const ShardUpdate& shard : run) shard.parameter.unsafeGetTensorImpl()->bump_version();
}

/// Whether the kernel can update the shard where it is.
bool in_place(const ShardUpdate& shard) {
  return shard.parameter.is_contiguous() &&
         update_type(shard.parameter.scalar_type()) == shard.parameter.scalar_type();
}

}  // namespace

void SlotOptimizer::count(const std::vector<ShardUpdate>& shards, std::size_t group) {
  if (!counts_steps_) return;
  std::vector<at::Tensor> counters;
  for (const ShardUpdate& shard : shards) {
    if (shard.group != group) continue;
    counters.push_back(states_[shard.index].step);
    ++states_[shard.index].steps;
  }
  if (!counters.empty()) at::_foreach_add_(merge_adjoining(counters), 1);
}

/// Whether two shards can be updated as one tensor.
bool SlotOptimizer::continues(const ShardUpdate& before, const ShardUpdate& shard) const {
  const State& state = states_[shard.index];
  const State& state_before = states_[before.index];
  if (!adjoins(before.parameter, shard.parameter) || !adjoins(before.gradient, shard.gradient) ||
      state.steps != state_before.steps) {
    return false;
  }
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    if (!adjoins(state_before.tensors[i], state.tensors[i])) return false;
  }
  return true;
}

std::vector<SlotOptimizer::Run> SlotOptimizer::runs_of(
    const std::vector<ShardUpdate>& shards) const {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < shards.size();) {
    std::size_t end = i + 1;
    while (end < shards.size() && continues(shards[end - 1], shards[end])) ++end;
    runs.push_back(Run(shards).subspan(i, end - i));
    i = end;
  }
  return runs;
}

void SlotOptimizer::add(Batch& batch, Run run) const {
  std::int64_t numel = 0;
  for (const ShardUpdate& shard : run) numel += shard.parameter.numel();
  const State& state = states_[run.front().index];
  batch.parameters.push_back(joined(run.front().parameter, run.size(), numel));
  batch.gradients.push_back(joined(run.front().gradient, run.size(), numel));
  batch.states.resize(state.tensors.size());
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    batch.states[i].push_back(joined(state.tensors[i], run.size(), numel));
  }
  if (counts_steps_) batch.steps.push_back(state.step);
}

void SlotOptimizer::update_rounded(Run run, double factor, const Kernel& kernel) const {
  Batch batch;
  add(batch, run);
  const at::Tensor rounded = batch.parameters[0];
  const c10::ScalarType type = update_type(rounded.scalar_type());
  batch.parameters[0] = rounded.to(type).contiguous();
  batch.gradients[0] = batch.gradients[0].to(type).contiguous();
  if (factor != 1.0) batch.gradients[0] = batch.gradients[0].mul(factor);
  kernel(batch);
  rounded.copy_(batch.parameters[0]);
}

void SlotOptimizer::for_each_batch(const std::vector<ShardUpdate>& shards, std::size_t group,
                                   double factor, const Kernel& kernel) {
  count(shards, group);
  std::vector<ShardUpdate> kept;
  for (const ShardUpdate& shard : shards) {
    if (shard.group != group || shard.parameter.numel() == 0) continue;
    kept.push_back(shard);
    if (in_place(shard)) {
      at::Tensor& gradient = kept.back().gradient;
      gradient = gradient.to(shard.parameter.scalar_type()).contiguous();
    }
  }
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, Batch> batches;
  const std::vector<Run> runs = runs_of(kept);
  for (const Run run : runs) {
    const at::Tensor& first = run.front().parameter;
    if (in_place(run.front())) {
      add(batches[{first.device().type(), first.scalar_type()}], run);
    } else {
      update_rounded(run, factor, kernel);
    }
  }
  for (const auto& [kind, batch] : batches) {
    if (factor != 1.0) at::_foreach_mul_(batch.gradients, factor);
    kernel(batch);
  }
  std::ranges::for_each(runs, mark_changed);
}

}  // namespace tessera::optim
