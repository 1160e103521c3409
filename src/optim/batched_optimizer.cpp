// Turns single shards into few kernel calls. FSDP lays the shards of a unit side by side, and
// SlotOptimizer their states likewise: shards that adjoin everywhere are updated as one tensor, if
// that gives the same bits.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "local_shards.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/optim/slot_optimizer.h"

namespace tessera::optim {
namespace {

/// libtorch's fused kernels on the CPU round the elements behind the last whole vector differently.
/// This many elements are whole vectors, and their threads take multiples of them: a cache line of
/// fp32.
constexpr std::int64_t kCacheLine = 16;

/// `count` tensors that adjoin in memory, beginning with `first`, as one. A single shard keeps its
/// own tensor, which is as good and not a view.
at::Tensor joined(const at::Tensor& first, std::size_t count, std::int64_t numel) {
  return count == 1 ? first : flat_view(first, numel);
}

/// The kernel's view: complex numbers are pairs of real ones, which are updated independently.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

/// Tells autograd that these have changed: the kernel wrote to them through another tensor, or is
/// one of libtorch's fused kernels, which do not report writes.
void mark_changed(std::span<const ShardUpdate> run) {
  for (const ShardUpdate& shard : run) {
    tessera::detail::count_write(shard.parameter);
  }
}

/// Device, type, and type of the state.
using BatchKind = std::tuple<c10::DeviceType, c10::ScalarType, c10::ScalarType>;

BatchKind kind_of(const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
  const at::Tensor& state = states.empty() ? parameter : states.front();
  return {parameter.device().type(), c10::toRealValueType(parameter.scalar_type()),
          c10::toRealValueType(state.scalar_type())};
}

/// Whether the kernel can update the shard where it is.
bool in_place(const ShardUpdate& shard) {
  return shard.parameter.is_contiguous() &&
         update_type(shard.parameter.scalar_type()) == shard.parameter.scalar_type();
}

/// The shards that have elements, with gradients as a list kernel takes them. Gradients are brought
/// to the type of the parameter here for shards that are updated in place; for the others
/// update_rounded() does it, for one run at a time. A shard without elements has nothing to update.
std::vector<ShardUpdate> prepared(std::span<const ShardUpdate> shards) {
  std::vector<ShardUpdate> kept;
  for (const ShardUpdate& shard : shards) {
    if (shard.parameter.numel() == 0) {
      continue;
    }
    kept.push_back(shard);
    if (in_place(shard)) {
      at::Tensor& gradient = kept.back().gradient;
      gradient = gradient.to(shard.parameter.scalar_type()).resolve_conj().contiguous();
    }
  }
  return kept;
}

}  // namespace

void BatchedOptimizer::update_shards(const std::vector<ShardUpdate>& shards,
                                     double gradient_factor) {
  update_groups(shards, {.number = gradient_factor});
}

void BatchedOptimizer::update_shards_scaled(const std::vector<ShardUpdate>& shards,
                                            const at::Tensor& gradient_factor) {
  update_groups(shards, {.tensor = gradient_factor});
}

void BatchedOptimizer::update_groups(const std::vector<ShardUpdate>& shards, const Factor& factor) {
  // Parameters are kept group by group, and so are their shards.
  for (auto first = shards.begin(); first != shards.end();) {
    const std::size_t group = first->group;
    const auto last = std::find_if(
        first, shards.end(), [group](const ShardUpdate& shard) { return shard.group != group; });
    update_group(Run(first, last), group, factor);
    first = last;
  }
}

/// Counters first: a batch takes their values after this step. Gradients are scaled in place, as
/// their values are not needed afterwards.
void BatchedOptimizer::update_group(Run shards, std::size_t group, const Factor& factor) {
  count_step(shards);
  const std::vector<ShardUpdate> kept = prepared(shards);
  const std::vector<Run> runs = runs_of(kept);
  // A list kernel takes tensors of one type on one device.
  std::map<BatchKind, Batch> batches;
  for (const Run run : runs) {
    const at::Tensor& first = run.front().parameter;
    if (in_place(run.front())) {
      add(batches[kind_of(first, state_of(run.front().index).tensors)], run);
    } else {
      update_rounded(run, group, factor);
    }
  }
  for (auto& [kind, batch] : batches) {
    update_multiplied(batch, group, factor);
  }
  // After the kernels: a version that has changed says that the values have.
  std::ranges::for_each(runs, mark_changed);
}

/// The factor goes to the kernel, or the gradients are multiplied before it.
void BatchedOptimizer::update_multiplied(Batch& batch, std::size_t group, const Factor& factor) {
  const at::TensorOptions options =
      at::dtype(c10::ScalarType::Double).device(batch.parameters.front().device());
  if (takes_gradient_factor(batch, group)) {
    if (factor.tensor.defined()) {
      batch.gradient_factor = factor.tensor.to(options);
    } else if (factor.number != 1.0) {
      batch.gradient_factor = at::scalar_tensor(factor.number, options);
    }
  } else if (factor.tensor.defined()) {
    scale_by(batch.gradients, factor.tensor);
  } else if (factor.number != 1.0) {
    at::_foreach_mul_(batch.gradients, factor.number);
  }
  update_batch(batch, group);
}

void BatchedOptimizer::count_step(Run shards) {
  if (!counts_steps()) {
    return;
  }
  std::vector<at::Tensor> counters;
  for (const ShardUpdate& shard : shards) {
    State& state = state_of(shard.index);
    counters.push_back(state.step);
    ++state.steps;
  }
  at::_foreach_add_(merge_adjoining(counters), 1);
}

/// Whether two shards can be updated as one tensor: they, their gradients and their states adjoin,
/// and they have made equally many steps, since a kernel takes one step number for a tensor. The
/// first must end with a whole vector, so that a shard's new bits never depend on its neighbours:
/// ranks of tensor parallelism hold copies of one parameter beside unequal shards of others, and
/// the copies would drift apart.
bool BatchedOptimizer::adjoin_in_memory(const ShardUpdate& before, const ShardUpdate& shard) const {
  const State& state = state_of(shard.index);
  const State& state_before = state_of(before.index);
  if (before.parameter.numel() % kCacheLine != 0 || state.steps != state_before.steps ||
      !adjoins(before.parameter, shard.parameter) || !adjoins(before.gradient, shard.gradient)) {
    return false;
  }
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    if (!adjoins(state_before.tensors[i], state.tensors[i])) {
      return false;
    }
  }
  return true;
}

/// In the order of the shards, which is that of the parameters: only neighbours in that order are
/// compared.
std::vector<BatchedOptimizer::Run> BatchedOptimizer::runs_of(
    const std::vector<ShardUpdate>& shards) const {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < shards.size();) {
    std::size_t end = i + 1;
    while (end < shards.size() && joins_shards(shards[i].group) &&
           adjoin_in_memory(shards[end - 1], shards[end])) {
      ++end;
    }
    runs.push_back(Run(shards).subspan(i, end - i));
    i = end;
  }
  return runs;
}

/// The run is in the batch as its first tensor, made longer. One step counter is enough: they are
/// equal (adjoin_in_memory).
void BatchedOptimizer::add(Batch& batch, Run run) const {
  std::int64_t numel = 0;
  for (const ShardUpdate& shard : run) {
    numel += shard.parameter.numel();
  }
  const State& state = state_of(run.front().index);
  batch.parameters.push_back(as_real(joined(run.front().parameter, run.size(), numel)));
  batch.gradients.push_back(as_real(joined(run.front().gradient, run.size(), numel)));
  batch.states.resize(state.tensors.size());
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    batch.states[i].push_back(as_real(joined(state.tensors[i], run.size(), numel)));
  }
  if (counts_steps()) {
    batch.steps.push_back(state.step);
  }
  batch.shards.push_back(run.front().index);
}

/// By itself, so that only one run has an fp32 copy at a time.
void BatchedOptimizer::update_rounded(Run run, std::size_t group, const Factor& factor) {
  Batch batch;
  add(batch, run);
  // What the new values are rounded back into: narrower than the update, or not contiguous.
  const at::Tensor rounded = batch.parameters[0];
  const c10::ScalarType type = update_type(rounded.scalar_type());
  batch.parameters[0] = rounded.to(type).contiguous();
  if (factor.tensor.defined()) {
    // In the type of the gradient, as if it had been clipped before.
    scale_by({batch.gradients[0]}, factor.tensor);
  }
  batch.gradients[0] = batch.gradients[0].to(type).contiguous();
  if (factor.number != 1.0) {
    // Not in place: the conversion above may have returned the gradient itself.
    batch.gradients[0] = batch.gradients[0].mul(factor.number);
  }
  update_batch(batch, group);
  rounded.copy_(batch.parameters[0]);
}

}  // namespace tessera::optim
