// The base class of optimizers selects parameters, makes optimizer state, and makes lists of
// tensors for kernels. Adjacent shards and their states are updated as one tensor if no bit of the
// result changes.

#include "tessera/optim/slot_optimizer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "local_shards.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::optim {

/// The constructor creates no state: tensor parallelism and FSDP may be applied later and would
/// change sizes and devices.
SlotOptimizer::SlotOptimizer(std::vector<std::vector<nn::SlotPtr>> groups,
                             std::vector<std::string> state_names, bool counts_steps)
    : state_names_(std::move(state_names)), counts_steps_(counts_steps) {
  std::unordered_map<const nn::ParameterSlot*, std::size_t> seen;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (nn::SlotPtr& slot : groups[group]) {
      TESSERA_CHECK(slot != nullptr, "an optimizer was given a null slot in group ", group,
                    "; pass slots of parameters, for example optim::slots_of(module)");
      const auto [found, is_new] = seen.emplace(slot.get(), group);
      TESSERA_CHECK(found->second == group, nn::describe(*slot), " is in the groups ",
                    found->second, " and ", group, " of an optimizer; put it in one group");
      if (!is_new) {
        continue;
      }
      parameters_.push_back(std::move(slot));
      group_of_.push_back(group);
    }
  }
  TESSERA_CHECK(!parameters_.empty(),
                "an optimizer was given no parameters; pass at least one, for example "
                "optim::slots_of(module), or leave the optimizer out");
  states_.resize(parameters_.size());
}

/// Throws Error if the optimizer cannot update a parameter. A step checks all parameters before any
/// parameter is changed, so a failed check changes nothing.
void SlotOptimizer::check_parameter(std::size_t index) const {
  const nn::ParameterSlot& slot = *parameters_[index];
  TESSERA_CHECK(slot.initialized(), "an optimizer cannot update ", nn::describe(slot),
                ", which was never filled; call nn::init_weights or load values first");
  if (states_[index].tensors.empty()) {
    return;
  }
  const at::Tensor& local = local_tensor(slot.persistent());
  const at::Tensor& state = states_[index].tensors[0];
  const c10::ScalarType type = state_dtype(group_of_[index], local.scalar_type());
  TESSERA_CHECK(
      state.scalar_type() == type, "the optimizer's state of ", nn::describe(slot), " (of type ",
      local.scalar_type(), ") has type ", state.scalar_type(), ", but type ", type,
      " is needed now; change the type of a parameter or of its state before the first step");
  TESSERA_CHECK(state.sizes() == local.sizes() && state.device() == local.device(),
                "the local shard of a parameter has sizes ", local.sizes(), " on ", local.device(),
                " but had ", state.sizes(), " on ", state.device(),
                " when the optimizer first updated it; apply TP and FSDP and move the module "
                "before the first step");
}

/// Creates missing state. zeros_beside() is called once for each state name, so that states of
/// adjacent shards are adjacent in memory.
void SlotOptimizer::make_states(const std::vector<std::size_t>& indices) {
  std::vector<std::size_t> missing;
  std::vector<at::Tensor> locals;
  std::vector<c10::ScalarType> dtypes;
  for (const std::size_t index : indices) {
    const State& state = states_[index];
    const bool lacks = counts_steps_ ? !state.step.defined() : state.tensors.empty();
    if (lacks && (counts_steps_ || !state_names_.empty())) {
      missing.push_back(index);
      locals.push_back(local_tensor(parameters_[index]->persistent()));
      dtypes.push_back(state_dtype(group_of_[index], locals.back().scalar_type()));
    }
  }
  for (std::size_t which = 0; which < state_names_.size(); ++which) {
    const std::vector<at::Tensor> zeros = zeros_beside(locals, dtypes);
    for (std::size_t i = 0; i < missing.size(); ++i) {
      states_[missing[i]].tensors.push_back(zeros[i]);
    }
  }
  if (!counts_steps_) {
    return;
  }
  const std::vector<at::Tensor> counters = counters_beside(locals);
  for (std::size_t i = 0; i < missing.size(); ++i) {
    states_[missing[i]].step = counters[i];
  }
}

c10::ScalarType SlotOptimizer::state_dtype(std::size_t /*group*/, c10::ScalarType parameter) const {
  return update_type(parameter);
}

/// Multiplies the gradients by the factor `given`; skips the step if the factor is NaN or infinite.
/// On a GPU only kernels read the factor, so the host does not wait.
void SlotOptimizer::update(const GradientFactor& given) {
  GradientFactor factor = given;
  const comm::CallerScope caller("optimizer step");
  const c10::AutoGradMode no_grad(false);
  const std::vector<ShardUpdate> shards = begin_step();
  if (factor.tensor.defined() && !shards.empty() && shards.front().parameter.is_cpu()) {
    factor.tensor = factor.tensor.cpu();
    if (!std::isfinite(factor.tensor.item<double>())) {
      return;
    }
  }
  update_shards(shards, factor);
  note_counters();
}

void SlotOptimizer::scale_gradients(const std::vector<ShardUpdate>& shards,
                                    const at::Tensor& factor) {
  std::vector<at::Tensor> gradients;
  for (const ShardUpdate& shard : shards) {
    if (shard.gradient.defined()) {
      gradients.push_back(shard.gradient);
    }
  }
  scale_by(merge_adjoining(gradients), factor);
}

void SlotOptimizer::update_batch(const Batch& /*batch*/, std::size_t /*group*/) {
  fail("an optimizer overrides neither update_batch() nor update_shards(); override one of them");
}

std::vector<ShardUpdate> SlotOptimizer::begin_step() {
  check_rates();
  std::vector<ShardUpdate> shards;
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // The reduction of a Partial gradient is collective. So gradients are visited in the order of
    // the parameters, which is the same on every rank.
    const at::Tensor grad = slot_gradient(*parameters_[i]);
    const at::Tensor& parameter = parameters_[i]->persistent();
    if (!grad.defined() && !updates_without_gradient(parameter)) {
      continue;
    }
    check_parameter(i);
    shards.push_back({i, group_of_[i], local_tensor(parameter),
                      grad.defined() ? local_tensor(grad) : at::Tensor()});
    indices.push_back(i);
  }
  make_states(indices);
  read_counters();
  ++calls_;
  return shards;
}

/// Creates missing state, so that a checkpoint can be loaded before the first step. The returned
/// tensors share the state's memory.
std::vector<StateTensor> SlotOptimizer::state() {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::size_t> shown;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    check_parameter(i);
    // A frozen parameter has state only if it was updated by an earlier step.
    if (parameters_[i]->persistent().requires_grad() || states_[i].step.defined() ||
        !states_[i].tensors.empty()) {
      shown.push_back(i);
    }
  }
  make_states(shown);
  std::vector<StateTensor> list;
  for (const std::size_t i : shown) {
    const nn::SlotPtr& slot = parameters_[i];
    for (std::size_t which = 0; which < state_names_.size(); ++which) {
      list.push_back({slot, state_names_[which],
                      with_layout_of(slot->persistent(), states_[i].tensors[which])});
    }
    if (counts_steps_) {
      list.push_back({slot, "step", states_[i].step});
    }
  }
  return list;
}

void SlotOptimizer::read_counters() {
  for (State& state : states_) {
    if (state.step.defined() && tessera::detail::writes_of(state.step) != state.writes) {
      state.history = static_cast<std::uint64_t>(state.step.item<double>());
    }
  }
}

void SlotOptimizer::note_counters() {
  for (State& state : states_) {
    state.writes = state.step.defined() ? tessera::detail::writes_of(state.step) : 0;
  }
}

namespace {

/// The number of fp32 elements in a cache line. libtorch's fused CPU kernels round the elements
/// after the last complete vector differently. Shards whose size is a multiple of this number have
/// no such elements.
constexpr std::int64_t kCacheLine = 16;

at::Tensor joined(const at::Tensor& first, std::size_t count, std::int64_t numel) {
  return count == 1 ? first : flat_view(first, numel);
}

/// Kernels update complex numbers as pairs of real numbers.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

/// libtorch's fused kernels do not increment version counters of the tensors they update. Neither
/// do kernels that write several shards through one flat view.
void mark_changed(std::span<const ShardUpdate> run) {
  for (const ShardUpdate& shard : run) {
    tessera::detail::count_write(shard.parameter);
  }
}

using BatchKind = std::tuple<c10::DeviceType, c10::ScalarType, c10::ScalarType>;

BatchKind kind_of(const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
  const at::Tensor& state = states.empty() ? parameter : states.front();
  return {parameter.device().type(), c10::toRealValueType(parameter.scalar_type()),
          c10::toRealValueType(state.scalar_type())};
}

bool in_place(const ShardUpdate& shard) {
  return shard.parameter.is_contiguous() &&
         update_type(shard.parameter.scalar_type()) == shard.parameter.scalar_type();
}

/// Returns the shards that are not empty. Gradients of shards that are updated in place are
/// converted to the parameter's dtype and made contiguous, as list kernels require.
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

void SlotOptimizer::update_shards(const std::vector<ShardUpdate>& shards,
                                  const GradientFactor& factor) {
  // Shards are in the order of the parameters. Each iteration updates one parameter group.
  for (auto first = shards.begin(); first != shards.end();) {
    const std::size_t group = first->group;
    const auto last = std::find_if(
        first, shards.end(), [group](const ShardUpdate& shard) { return shard.group != group; });
    update_group(Run(first, last), group, factor);
    first = last;
  }
}

/// Step counters are incremented first, because kernels need the number of this step. Gradients are
/// scaled in place, because the program does not need them after the step.
void SlotOptimizer::update_group(Run shards, std::size_t group, const GradientFactor& factor) {
  count_step(shards, factor);
  const std::vector<ShardUpdate> kept = prepared(shards);
  const std::vector<Run> runs = runs_of(kept);
  // A list kernel needs tensors of one dtype on one device.
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
  // Version counters are incremented last: code that sees a new version must find the new values.
  std::ranges::for_each(runs, mark_changed);
}

void SlotOptimizer::update_multiplied(Batch& batch, std::size_t group,
                                      const GradientFactor& factor) {
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

/// `history` is a hash of the step() calls since the host last read the step counter. Shards with
/// equal `history` have made the same steps. With a gradient factor on a device, the host does not
/// know the number of steps.
void SlotOptimizer::count_step(Run shards, const GradientFactor& factor) {
  if (!counts_steps_) {
    return;
  }
  std::vector<at::Tensor> counters;
  for (const ShardUpdate& shard : shards) {
    State& state = state_of(shard.index);
    counters.push_back(state.step);
    state.history = (state.history + calls_) * 0x9E3779B97F4A7C15ULL;
  }
  const std::vector<at::Tensor> runs = merge_adjoining(counters);
  if (!factor.tensor.defined()) {
    at::_foreach_add_(runs, 1);
    return;
  }
  const at::Tensor number = factor.tensor.to(c10::ScalarType::Double);
  const at::Tensor finite = number.sub(number).eq(0);  // x - x is NaN if x is NaN or infinite
  for (const at::Tensor& run : runs) {
    run.add_(finite.to(run.device()));
  }
}

/// Whether two shards can be updated as one tensor: adjacent in memory, and with the same steps.
/// The first shard's size must be a multiple of kCacheLine, so that the second shard does not
/// affect the rounding of the first.
bool SlotOptimizer::adjoin_in_memory(const ShardUpdate& before, const ShardUpdate& shard) const {
  const State& state = state_of(shard.index);
  const State& state_before = state_of(before.index);
  if (before.parameter.numel() % kCacheLine != 0 || state.history != state_before.history ||
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

/// Divides `shards` into runs. A run consists of consecutive shards that one tensor can replace.
std::vector<SlotOptimizer::Run> SlotOptimizer::runs_of(
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

/// Adds a run (consecutive shards) to `batch` as one tensor. All shards of a run have equal step
/// counters (adjoin_in_memory), so one counter is enough.
void SlotOptimizer::add(Batch& batch, Run run) const {
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
  if (counts_steps_) {
    batch.steps.push_back(state.step);
  }
  batch.shards.push_back(run.front().index);
}

/// Updates shards of a dtype narrower than fp32 in an fp32 copy, which is freed at the end.
void SlotOptimizer::update_rounded(Run run, std::size_t group, const GradientFactor& factor) {
  Batch batch;
  add(batch, run);
  // `rounded` gets the new values. Kernels cannot write to `rounded`, because `rounded` has a
  // narrower dtype than the update or is not contiguous.
  const at::Tensor rounded = batch.parameters[0];
  const c10::ScalarType type = update_type(rounded.scalar_type());
  batch.parameters[0] = rounded.to(type).contiguous();
  if (factor.tensor.defined()) {
    // The gradient is multiplied by the factor in the gradient's dtype, as in clip_grad_norm_().
    scale_by({batch.gradients[0]}, factor.tensor);
  }
  batch.gradients[0] = batch.gradients[0].to(type).contiguous();
  if (factor.number != 1.0) {
    // mul() is used, not mul_(), because to() can return the gradient itself, which must not change
    batch.gradients[0] = batch.gradients[0].mul(factor.number);
  }
  if (factor.tensor.defined() && takes_gradient_factor(batch, group)) {
    // The gradient is already scaled, so the kernel gets the factor 1, or NaN if the step must be
    // skipped.
    batch.gradient_factor =
        factor.tensor.to(batch.parameters[0].device(), at::kDouble).mul(0).add(1);
  }
  update_batch(batch, group);
  rounded.copy_(batch.parameters[0]);
}

}  // namespace tessera::optim
