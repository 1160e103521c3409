// What a unit does around the forward and the backward of its modules: gather, prefetch, free,
// reduce. UnitPhase says where it stands, and each hook begins by asking it, because the same hook
// is called in forward, in a recomputation and in a backward of a backward.

#include "unit/unit.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/calls.h"
#include "unit/backward_hooks.h"
#include "unit/boundary.h"

namespace tessera::fsdp {
namespace {

/// A prefetch: starts all-gathers and waits for none. Units that are gone are left out.
void start_unshard_all(const std::vector<std::weak_ptr<Unit>>& units) {
  for (const std::weak_ptr<Unit>& unit : units) {
    if (const std::shared_ptr<Unit> alive = unit.lock()) {
      alive->start_unshard();
    }
  }
}

/// Adds what was done, and for which unit, to what libtorch throws: out of memory, for example.
template <class Act>
auto naming(const char* what, const std::string& label, Act&& act) {
  try {
    return act();
  } catch (c10::Error& error) {
    error.add_context(detail::concat(what, " of ", label));
    throw;
  }
}

std::shared_ptr<Settings> initial_settings(const UnitSpec& spec) {
  auto settings = std::make_shared<Settings>();
  // Until a root is known there is no FQN: the class has to do.
  settings->label = detail::concat("a unit of ", spec.modules.front()->name());
  settings->reshard_after_forward = spec.options.reshard_after_forward;
  // Pieces are kept where parameters are freed, so that asking for them is asking for that.
  if (spec.options.post_forward_mesh_size > 1 && !spec.options.reshard_after_forward) {
    settings->reshard_after_forward = true;
  }
  return settings;
}

}  // namespace

Unit::Unit(const UnitSpec& spec)
    : modules_(spec.modules),
      mp_policy_(spec.options.mp_policy),
      may_be_unused_(spec.options.may_be_unused),
      ignored_(spec.options.ignored),
      settings_(initial_settings(spec)),
      groups_(spec, settings_) {}

void Unit::install() {
  // The modules own this, and the hooks are the modules'.
  for (nn::ModuleBase* module : modules_) {
    module->add_forward_pre_hook([this](auto&, nn::TensorList inputs) { pre_forward(inputs); });
    module->add_forward_hook(
        [this](auto& self, nn::TensorList outputs) { post_forward(self, outputs); });
    module->add_always_hook([this] { end_call(); });
  }
}

std::vector<std::shared_ptr<Unit>> Unit::units_of_iteration() {
  return iteration_ != nullptr ? iteration_->units() : std::vector{shared_from_this()};
}

bool Unit::runs_forward() const {
  return phase_ == UnitPhase::kForward || phase_ == UnitPhase::kForwardRecorded;
}

/// enter() refuses kIdle from kIdle.
void Unit::rest() {
  if (phase() != UnitPhase::kIdle) {
    enter(UnitPhase::kIdle);
  }
}

void Unit::prepare() {
  // Ranks compare parameters only once, since the exchange has a cost.
  groups_.prepare(phase_ == UnitPhase::kNew);
  rest();
}

void Unit::start_unshard() {
  // By hand before the root's first forward, which prepares all units.
  if (phase_ == UnitPhase::kNew) {
    prepare();
  }
  const bool began = naming("all-gather", label(), [this] { return groups_.start_unshard(); });
  if (began && iteration_ != nullptr) {
    iteration_->began_gather(*this);
  }
}

void Unit::unshard() {
  start_unshard();
  groups_.each(&GatheredState::unshard, comm_context());
  groups_.each(&GatheredState::show);
}

void Unit::reshard() {
  groups_.each(&GatheredState::reshard, comm_context());
  free_idle_buffers();
}

/// An iteration frees them at its end.
void Unit::free_idle_buffers() {
  if (iteration_ == nullptr || !iteration_->is_under_way()) {
    comm_context().pool().clear();
  }
}

// Forward.

/// The rows are those of the previous training forward: by now the program has computed its loss,
/// and may have weighed it. Warns once, since the program may mean it so.
void Unit::warn_of_uneven_rows() {
  const auto [least, most] = random_agreement_.rows();
  const bool said = settings_->gradient_divisor || nn::weighs_ranks();
  if (least == most || said || std::exchange(warned_of_rows_, true)) {
    return;
  }
  TORCH_WARN("the ranks give ", label(), " differently many rows, ", least, " to ", most,
             ", and the mean of their gradients is not that of all rows if each rank's loss is the "
             "mean of its own; multiply the loss by fsdp::mean_weight(rows, mesh), or pass "
             "CrossEntropyOptions::over (of a loss that is a sum, set_gradient_divide_factor)");
}

/// The root's input has the rows of the batch, also where it is called in the forward of another
/// model; so has that of a unit which is called by itself.
void Unit::begin_random_region(nn::TensorList inputs) {
  const detail::RandomRegionPtr& outer = detail::random_region();
  const std::shared_ptr<detail::BatchRows> known = outer != nullptr ? outer->rows() : nullptr;
  if (known != nullptr && (known->is_given() || !is_root())) {
    return;
  }
  const auto batch = std::ranges::find_if(
      inputs, [](const at::Tensor* tensor) { return tensor->defined() && tensor->dim() > 0; });
  const auto sizes = batch != inputs.end() ? std::optional((*batch)->sizes().vec()) : std::nullopt;
  const std::vector<DeviceMesh> dims = groups_.mesh().data_dims();
  const auto rows = std::make_shared<detail::BatchRows>(dims, sizes);
  random_regions_.back() = std::make_unique<detail::RandomRegionScope>(
      std::make_shared<detail::RandomRegion>(outer, rows));
  // Replicas may evaluate by themselves. A recomputation has the places of its forward. After an
  // error of this rank alone the others are in other exchanges.
  const bool trains = modules_.front()->is_training() && c10::GradMode::is_enabled();
  if (!is_root() || !trains || nn::is_recomputing()) {
    return;
  }
  nn::set_batch_ranks(groups_.mesh().ranks());
  warn_of_uneven_rows();
  if (!follows_abandoned_) {
    random_agreement_.begin_forward(modules_, dims, rows, sizes ? sizes->front() : 0,
                                    [this] { return iteration_->groups_on(groups_.mesh().all); });
  }
}

void Unit::end_call() {
  // Another hook may have thrown before ours ran.
  if (!random_regions_.empty()) {
    random_regions_.pop_back();
  }
}

void Unit::pre_forward(nn::TensorList inputs) {
  random_regions_.emplace_back();
  // Activation checkpointing runs a part of the forward again, maybe before the gradient of this
  // unit's results has come.
  if (nn::is_recomputing()) {
    pre_backward();
  } else if (phase() != UnitPhase::kBackward || iteration_->backward_failed()) {
    enter_as_root();
  }
  begin_random_region(inputs);
  if (is_root()) {
    // Only the root's: a unit below gets what the model has computed.
    move_inputs(inputs, groups_.mesh().device());
  }
  if (mp_policy_.restore_input_dtype) {
    restored_dtype_ = floating_type(inputs);
  }
  if (mp_policy_.cast_forward_inputs) {
    cast_floating(inputs, mp_policy_.param_dtype);
  }
  const OperatorModePause pause;  // a policy is asked of the model's own operators
  if (phase_ == UnitPhase::kBackward) {
    unshard();
    if (nn::is_recomputing()) {
      // As in forward: a tensor-parallel product asks which node has made its input.
      call_after_backward(inputs, [](nn::TensorList) {});
    }
  } else if (!runs_forward()) {
    begin_forward(inputs);
  }
}

void Unit::begin_forward(nn::TensorList inputs) {
  unshard();
  std::ranges::for_each(groups(), &ParameterGroup::begin_use);
  // After this unit's own all-gathers, which are needed first and go in the same lane.
  prefetch_for_forward();
  enter(UnitPhase::kForward);
  if (to_run_.empty()) {  // or a backward ran between two of the modules
    to_run_.insert(modules_.begin(), modules_.end());
  }
  // Without gradients no backward comes. Where no input needs a gradient no hook is set either:
  // end_backward() then settles the unit.
  if (c10::GradMode::is_enabled()) {
    call_after_backward(inputs, [unit = shared_from_this()](nn::TensorList gradients) {
      unit->post_backward(gradients);
    });
  }
}

/// The next unit's all-gather runs beside this one's computation. In the first forward no order is
/// known.
void Unit::prefetch_for_forward() {
  const std::shared_ptr<Unit> next = iteration_->gather_ahead(*this);
  if (!settings_->forward_prefetch.empty()) {
    start_unshard_all(settings_->forward_prefetch);
  } else if (next != nullptr) {
    next->start_unshard();
  }
}

void Unit::post_forward(nn::ModuleBase& module, nn::TensorList outputs) {
  cast_floating(outputs, mp_policy_.output_dtype ? mp_policy_.output_dtype : restored_dtype_);
  if (phase_ == UnitPhase::kBackward) {
    return;
  }
  // A method that called forward ends after it (register_forward_method).
  if (!runs_forward()) {
    enter(phase_ == UnitPhase::kAwaitingBackward ? UnitPhase::kForwardRecorded
                                                 : UnitPhase::kForward);
  }
  await_backward(outputs);
  to_run_.erase(&module);
  if (to_run_.empty()) {
    end_forward();
  }
}

void Unit::await_backward(nn::TensorList outputs) {
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  // Lives as long as the graph does.
  const auto token = std::make_shared<char>();
  const bool hooked =
      call_before_backward(outputs, [unit = shared_from_this(), token] { unit->pre_backward(); });
  // In a unit of several modules the first result records it in the order; one entry is enough.
  if (!hooked || phase_ == UnitPhase::kForwardRecorded) {
    return;
  }
  // A unit that only some ranks ran must not change what they prefetch.
  if (!may_be_unused_) {
    iteration_->ran_forward(*this, token);
  }
  enter(UnitPhase::kForwardRecorded);
}

void Unit::end_partial_forward() {
  if (to_run_.empty()) {
    return;
  }
  // Once: it is no error, and may be meant.
  if (!std::exchange(warned_, true)) {
    TORCH_WARN(label(), ": ", to_run_.size(), " of its ", modules_.size(), " modules, one a ",
               (*to_run_.begin())->name(), ", did not run in a forward of the root; modules that ",
               "fully_shard made one unit must all run in each forward");
  }
  to_run_.clear();
  if (runs_forward()) {
    end_forward();
  } else if (phase_ != UnitPhase::kBackward) {  // a backward ran between two of the modules
    free_after_forward();
  }
}

void Unit::end_forward() {
  const std::string lost = lost_write("forward of " + label());
  TESSERA_CHECK(lost.empty(), lost, " (stock Embedding: leave out max_norm)");
  // Before the iteration's end, which depends on it.
  enter(phase_ == UnitPhase::kForwardRecorded ? UnitPhase::kAwaitingBackward : UnitPhase::kIdle);
  if (is_root()) {
    iteration_->end_forward(/*backward_comes=*/phase_ == UnitPhase::kAwaitingBackward);
  }
  free_after_forward();
  free_idle_buffers();
}

/// What is freed here and gathered again in backward is what ZeRO-3 saves.
void Unit::free_after_forward() {
  if (may_be_unused_) {
    hide();  // and free when backward ends, or the iteration, which frees all
  } else if (phase() != UnitPhase::kAwaitingBackward) {
    groups_.reshard_within_step();
  } else if (settings_->reshard_after_forward.value_or(!is_root())) {
    groups_.each(&GatheredState::reshard_for_now, comm_context());
  } else {
    hide();
  }
}

// Backward.

void Unit::pre_backward() {
  if (phase_ == UnitPhase::kBackward) {
    return;
  }
  enter(UnitPhase::kBackward);
  iteration_->enter_backward();
  if (settings_->unshard_in_backward || unsharded()) {
    unshard();
  }
  // Before more is gathered: what is left of the reduction is packed gradients.
  comm_context().finish_reductions();
  // After that, which calls hooks of the program on other units' gradients.
  groups_.each(&GradientState::lend_kept);
  // Last: this unit's own gather is needed first.
  prefetch_for_backward();
}

/// The all-gather of the unit that backward comes to next runs beside this one's computation.
void Unit::prefetch_for_backward() {
  const std::shared_ptr<Unit> before = iteration_->ran_before(*this);
  if (!settings_->backward_prefetch.empty()) {
    start_unshard_all(settings_->backward_prefetch);
    // A unit that must not gather in backward is not gathered ahead either.
  } else if (before != nullptr && before->settings_->unshard_in_backward) {
    before->start_unshard();
  }
}

void Unit::post_backward(nn::TensorList gradients) {
  // Ranks that did not run a unit have no hook here. So one that may be unused waits for the end of
  // backward, where all ranks come.
  if (phase_ == UnitPhase::kBackward && !may_be_unused_) {
    enter(UnitPhase::kIdle);
    settle_gradients();
  }
  // Where backward made a graph (create_graph), that of the gradients reads the parameters again.
  call_before_backward(gradients, [unit = shared_from_this()] { unit->pre_backward(); });
}

void Unit::settle_gradients() {
  // First, so that the reduction's buffers find memory that is free.
  free_after_backward();
  // Collective, in the order in which backward passes the units, which is the same on all ranks.
  naming("reduction", label(), [this] {
    settings_->gradient_sync ? comm_context().reduce(groups()) : groups_.each(&GradientState::keep);
  });
}

void Unit::end_backward() {
  const bool was_in_backward = phase_ == UnitPhase::kBackward;
  if (was_in_backward) {
    enter(UnitPhase::kIdle);
  }
  // A unit whose inputs need no gradient, or whose parameters got theirs after the inputs did.
  const bool late = groups_.any(&GradientState::any_unsharded);
  // Or one that only an earlier micro-batch used.
  const bool awaits = settings_->gradient_sync && groups_.any(&GradientState::awaits_reduction);
  if (was_in_backward || late || awaits || may_be_unused_) {
    settle_gradients();
  } else {
    free_after_backward();
  }
}

void Unit::free_after_backward() {
  settings_->reshard_after_backward ? groups_.reshard_within_step() : hide();
}

void Unit::end_micro_batch() {
  if (!settings_->step_goes_on()) {
    groups_.each(&GatheredState::drop_piece);
  }
}

}  // namespace tessera::fsdp
