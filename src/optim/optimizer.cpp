// Functions of all optimizers, OptimizerList, Ema and LrSchedule.

#include "tessera/optim/optimizer.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "local_shards.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::optim {
namespace {

/// Remembers for which parameter lists the ranks have already compared gradients, by the length of
/// the list. Stored in the module that owns the first parameter of each list.
struct Compared {
  std::set<std::size_t> lengths;
};

std::shared_ptr<Compared> compared_lists(const nn::ParameterSlot& first) {
  if (first.owners().empty()) {
    return nullptr;
  }
  nn::ModuleBase& module = *first.owners().front().module;
  auto lists = module.attached<Compared>();
  if (lists == nullptr) {
    lists = std::make_shared<Compared>();
    module.attach(lists);
  }
  return lists;
}

struct Roots {
  std::vector<DeviceMesh> meshes;  ///< root meshes of the parameters, in the parameters' order
  DeviceMesh largest;
};

Roots roots_of(const std::vector<nn::SlotPtr>& parameters) {
  Roots roots;
  for (const nn::SlotPtr& slot : parameters) {
    if (!tessera::is_distributed(slot->persistent())) {
      continue;
    }
    const DeviceMesh root = sharding_spec(slot->persistent()).mesh.root();
    if (std::ranges::find(roots.meshes, root) == roots.meshes.end()) {
      roots.meshes.push_back(root);
    }
    if (!roots.largest || root.size() > roots.largest.size()) {
      roots.largest = root;
    }
  }
  return roots;
}

std::vector<nn::detail::CopiedTensor> gradients_of(const std::vector<nn::SlotPtr>& parameters,
                                                   const DeviceMesh& root, bool with_plain) {
  std::vector<nn::detail::CopiedTensor> gradients;
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor& parameter = slot->persistent();
    const bool distributed = tessera::is_distributed(parameter);
    // A parameter without a name cannot be matched between ranks.
    if (slot->fqn().empty() || !parameter.requires_grad() || local_tensor(parameter).is_meta() ||
        (distributed ? sharding_spec(parameter).mesh.root() != root : !with_plain)) {
      continue;
    }
    const at::Tensor gradient = slot_gradient(*slot);
    gradients.push_back({.name = "the gradient of " + nn::describe(*slot),
                         .slot = slot.get(),
                         .values = gradient.defined() ? local_tensor(gradient) : gradient,
                         .rounded = true});
  }
  return gradients;
}

}  // namespace

void check_gradient_copies(const std::vector<nn::SlotPtr>& parameters, const char* what,
                           const NormOptions& options) {
  if (parameters.empty()) {
    return;
  }
  const std::shared_ptr<Compared> lists = compared_lists(*parameters.front());
  if (lists != nullptr && lists->lengths.contains(parameters.size()) &&
      !tessera::detail::debug_checks()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  const Roots roots = roots_of(parameters);
  for (const DeviceMesh& root : roots.meshes) {
    if (!options.over && root.size() > 1 && root.contains_this_rank()) {
      nn::detail::check_copies(tessera::detail::peers_of(root),
                               gradients_of(parameters, root, root == roots.largest),
                               {.what = what, .root = root});
    }
  }
  if (lists != nullptr) {
    lists->lengths.insert(parameters.size());
  }
}

/// Gradients that must be equal are compared in the first step (TESSERA_DEBUG=1: in each step).
void Optimizer::check_copies() {
  if (!compared_ || tessera::detail::debug_checks()) {
    check_gradient_copies(parameters(), "Optimizer::step");
    compared_ = true;
  }
}

void Optimizer::zero_grad() {
  for (const nn::SlotPtr& slot : parameters()) {
    nn::drop_gradient(*slot);
  }
}

void Optimizer::step(double gradient_factor) {
  check_copies();
  update({.number = gradient_factor});
}

void Optimizer::step(const at::Tensor& gradient_factor) {
  check_copies();
  update({.tensor = gradient_factor});
}

namespace {

void step_inner(Optimizer& optimizer, const GradientFactor& factor) {
  if (factor.tensor.defined()) {
    optimizer.step(factor.tensor);
  } else {
    optimizer.step(factor.number);
  }
}

}  // namespace

/// A parameter slot remains valid when FSDP or tensor parallelism replaces its tensor.
std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& module) {
  std::vector<nn::SlotPtr> slots;
  for (auto& [name, slot] : module.named_slots()) {
    slots.push_back(slot);
  }
  return slots;
}

/// Checkpoints can use names such as "layers.0.weight.exp_avg", which do not depend on the order of
/// the parameters in the optimizer.
std::vector<std::pair<std::string, at::Tensor>> named_state(Optimizer& optimizer,
                                                            const nn::ModuleBase& module) {
  std::unordered_map<const nn::ParameterSlot*, std::string> names;
  for (const auto& [name, slot] : module.named_slots()) {
    names.emplace(slot.get(), name);
  }
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (StateTensor& state : optimizer.state()) {
    const auto found = names.find(state.slot.get());
    TESSERA_CHECK(found != names.end(), "the optimizer updates ", nn::describe(*state.slot),
                  ", which the passed module does not have; pass the module that is optimized");
    named.emplace_back(found->second + "." + state.name, std::move(state.tensor));
  }
  return named;
}

/// A parameter that two optimizers have would be updated twice in a step.
OptimizerList::OptimizerList(std::vector<std::shared_ptr<Optimizer>> optimizers)
    : optimizers_(std::move(optimizers)) {
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const auto& optimizer : optimizers_) {
    TESSERA_CHECK(optimizer != nullptr,
                  "an OptimizerList was given a null optimizer; construct all optimizers first");
    for (const nn::SlotPtr& slot : optimizer->parameters()) {
      TESSERA_CHECK(seen.insert(slot.get()).second, nn::describe(*slot),
                    " was passed to two optimizers of an OptimizerList; pass it to one optimizer");
      parameters_.push_back(slot);
    }
  }
}

void OptimizerList::update(const GradientFactor& factor) {
  for (const auto& optimizer : optimizers_) {
    step_inner(*optimizer, factor);
  }
}

void OptimizerList::scale_lr(double factor) {
  for (const auto& optimizer : optimizers_) {
    optimizer->scale_lr(factor);
  }
}

std::vector<StateTensor> OptimizerList::state() {
  std::vector<StateTensor> all;
  for (const auto& optimizer : optimizers_) {
    for (StateTensor& state : optimizer->state()) {
      all.push_back(std::move(state));
    }
  }
  return all;
}

Ema::Ema(std::shared_ptr<Optimizer> inner, double decay) : inner_(std::move(inner)), decay_(decay) {
  TESSERA_CHECK(inner_ != nullptr,
                "an Ema was given a null optimizer; construct the optimizer first");
  TESSERA_CHECK(decay >= 0.0 && decay < 1.0, "an Ema with decay ", decay,
                " is invalid; it must be in [0, 1)");
}

/// While parameters and averages (EMA) are swapped, a step would train the averages, and a
/// checkpoint would save the averages as parameters.
void Ema::check_not_swapped() const {
  TESSERA_CHECK(!swapped_, "Ema: step() or state() was called while the parameters hold the ",
                "averages; call swap() again first");
}

/// Throws Error if an average (EMA) has other sizes than its parameter. Called before anything
/// changes.
void Ema::check_sizes(std::size_t index) const {
  const at::Tensor& local = local_tensor(parameters()[index]->persistent());
  const at::Tensor& average = averages_[index];
  TESSERA_CHECK(average.sizes() == local.sizes() && average.device() == local.device(),
                "Ema: the local shard of ", nn::describe(*parameters()[index]), " has sizes ",
                local.sizes(), " on ", local.device(), " but had ", average.sizes(), " on ",
                average.device(), " when its average began; apply TP and FSDP and move the module ",
                "before the first step and before the first call of state()");
}

/// Creates missing averages (EMA). The constructor cannot create averages, because parameters are
/// filled, sharded and moved later.
void Ema::make_averages() {
  averages_.resize(parameters().size());
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor& parameter = parameters()[i]->persistent();
    if (averages_[i].defined()) {
      check_sizes(i);
    } else if (parameter.requires_grad()) {
      const at::Tensor& local = local_tensor(parameter);
      averages_[i] = local.detach().to(update_type(local.scalar_type()), /*non_blocking=*/false,
                                       /*copy=*/true);
    }
  }
}

/// Copies each parameter to its average (EMA) if the average has no value yet. state() does not
/// copy, because a checkpoint can still be loaded into the parameter.
void Ema::begin_averages() {
  make_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].defined() && tessera::detail::writes_of(averages_[i]) == 0) {
      averages_[i].copy_(local_tensor(parameters()[i]->persistent()).detach());
    }
  }
}

void Ema::update(const GradientFactor& factor) {
  check_not_swapped();
  const c10::AutoGradMode no_grad(false);
  begin_averages();
  step_inner(*inner_, factor);
  average();
}

void Ema::average() {
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].defined()) {
      const at::Tensor local = local_tensor(parameters()[i]->persistent()).detach();
      averages_[i].lerp_(local.to(averages_[i].scalar_type()), 1.0 - decay_);
    }
  }
}

std::vector<StateTensor> Ema::state() {
  check_not_swapped();
  const c10::AutoGradMode no_grad(false);
  std::vector<StateTensor> all = inner_->state();
  make_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].defined()) {
      const nn::SlotPtr& slot = parameters()[i];
      all.push_back({slot, "ema", with_layout_of(slot->persistent(), averages_[i])});
    }
  }
  return all;
}

/// All parameters are checked before any values are swapped, so that an error changes nothing.
void Ema::swap() {
  const c10::AutoGradMode no_grad(false);
  begin_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    TESSERA_CHECK(
        !averages_[i].defined() ||
            local_tensor(parameters()[i]->persistent()).scalar_type() == averages_[i].scalar_type(),
        "Ema::swap: ", nn::describe(*parameters()[i]),
        " has a narrower type than its average; keep parameters in fp32 and compute in another "
        "type (fsdp::MixedPrecisionPolicy)");
  }
  swapped_ = !swapped_;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (!averages_[i].defined()) {
      continue;
    }
    const at::Tensor local = local_tensor(parameters()[i]->persistent()).detach();
    const at::Tensor kept = local.clone();
    local.copy_(averages_[i]);
    averages_[i].copy_(kept);
  }
}

namespace {

constexpr std::array<std::pair<std::string_view, Schedule>, 4> kNames{
    {{"constant", Schedule::kConstant},
     {"linear", Schedule::kLinear},
     {"cosine", Schedule::kCosine},
     {"wsd", Schedule::kWsd}}};

std::string_view name_of(Schedule schedule) {
  return std::ranges::find(kNames, schedule, [](const auto& known) { return known.second; })->first;
}

}  // namespace

Schedule parse_schedule(std::string_view name) {
  for (const auto& [known, schedule] : kNames) {
    if (name == known) {
      return schedule;
    }
  }
  fail("schedule '", name, "' is unknown; use constant, linear, cosine or wsd");
}

namespace {

std::int64_t requested_decay(const LrScheduleOptions& o) {
  return std::llround(o.decay_ratio * static_cast<double>(o.steps));
}

/// Returns the number of steps in which the learning rate falls. A decay that began during the
/// warm-up would make the rate drop suddenly afterwards.
std::int64_t decay_steps(const LrScheduleOptions& o) {
  return std::min(requested_decay(o), std::max(o.steps - o.warmup, std::int64_t{0}));
}

}  // namespace

LrSchedule::LrSchedule(const LrScheduleOptions& options) : options_(options) {
  const auto is_share = [](double value) { return value >= 0 && value <= 1; };
  TESSERA_CHECK(options.warmup >= 0 && options.steps >= 0, "a schedule of ", options.steps,
                " steps with a warm-up of ", options.warmup,
                " is invalid; neither may be negative");
  TESSERA_CHECK(is_share(options.decay_ratio) && is_share(options.min_factor),
                "a schedule with decay_ratio ", options.decay_ratio, " and min_factor ",
                options.min_factor, " is invalid; both must be from 0 to 1");
  if (options.schedule == Schedule::kWsd && requested_decay(options) > decay_steps(options)) {
    TORCH_WARN("a wsd schedule of ", options.steps, " steps should decay in the last ",
               requested_decay(options), ", but its warm-up takes the first ", options.warmup,
               "; the decay is shortened to the last ", decay_steps(options));
  }
}

/// The first factor of the warm-up is not 0, because a step with rate 0 would change nothing.
double LrSchedule::factor(std::int64_t step) const {
  const LrScheduleOptions& o = options_;
  TESSERA_CHECK(step >= 0, "the learning rate of step ", step, " is invalid; steps count from 0");
  // The constructor does not check `steps`, because a run of 0 steps also makes a schedule.
  TESSERA_CHECK(o.schedule == Schedule::kConstant || o.steps > 0, "the learning rate of step ",
                step, " of a ", name_of(o.schedule),
                " schedule needs LrScheduleOptions::steps, the number of steps of the run");
  if (step < o.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(o.warmup);
  }
  if (o.schedule == Schedule::kConstant) {
    return 1.0;
  }
  // step >= o.steps comes first: if the warm-up fills the run, falling() would divide by 0.
  const double factor = step >= o.steps ? 0.0 : falling(step);
  return o.min_factor + (1 - o.min_factor) * factor;
}

/// The factor of the learning rate after the warm-up, without min_factor: falls from 1 to 0.
double LrSchedule::falling(std::int64_t step) const {
  const LrScheduleOptions& o = options_;
  if (o.schedule == Schedule::kWsd) {
    const std::int64_t decay = decay_steps(o);
    const std::int64_t left = o.steps - step;
    return left >= decay ? 1.0 : static_cast<double>(left) / static_cast<double>(decay);
  }
  const double progress =
      static_cast<double>(step - o.warmup) / static_cast<double>(o.steps - o.warmup);
  if (o.schedule == Schedule::kLinear) {
    return 1.0 - progress;
  }
  return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace tessera::optim
