#include "unit.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

// A unit moves the inputs of forward to the unit's device, and casts inputs and results as the
// mixed-precision policy says. Buffers are moved once, when the unit is made.

namespace {

/// Whether `tensor` must be moved to `device`. Distributed tensors are on their mesh's device, and
/// meta tensors have no data to move.
bool is_elsewhere(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() && tensor.device() != device && !tensor.is_meta() &&
         !tessera::is_distributed(tensor);
}

bool is_floating(const at::Tensor* tensor) {
  return tensor->defined() && tensor->is_floating_point();
}

void move_buffers_of(torch::nn::Module& module, c10::Device device,
                     const std::unordered_set<nn::SlotPtr>& ignored) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    for (const auto& [name, slot] : ours->buffer_slots()) {
      if (!ignored.contains(slot) && is_elsewhere(slot->get(), device)) {
        // nn::Parameter members refer to the nn::ParameterSlot, so replacing the tensor in the slot
        // is enough.
        slot->swap(slot->get().to(device));
      }
    }
  }
  for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    if (is_elsewhere(buffer, device)) {
      // The buffer is moved in place, because the program can reference the tensor from libtorch's
      // register_buffer.
      buffer.set_data(buffer.to(device));
    }
  }
}

std::optional<c10::ScalarType> floating_type(nn::TensorList tensors) {
  const auto first = std::ranges::find_if(tensors, is_floating);
  if (first == tensors.end()) {
    return std::nullopt;
  }
  return (*first)->scalar_type();
}

void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype) {
  if (!dtype) {
    return;
  }
  for (at::Tensor* tensor : tensors) {
    if (is_floating(tensor)) {
      *tensor = tensor->to(*dtype);
    }
  }
}

// libtorch's C++ modules have no backward hooks. So FSDP adds an autograd node to a unit's inputs
// and tensor hooks to the unit's results.

using tessera::detail::variable_list;

using GradientHook = std::function<void(nn::TensorList gradients)>;

/// An identity node that calls a callback in backward. Autograd runs the newest ready node first,
/// so this oldest node of the unit runs last.
struct CallAfter final : tessera::detail::Node {
  explicit CallAfter(GradientHook then) : callback(std::move(then)) {}

  variable_list apply(variable_list&& gradients) override {
    std::vector<at::Tensor*> tensors;
    for (at::Tensor& gradient : gradients) {
      tensors.push_back(&gradient);
    }
    callback(tensors);
    return std::move(gradients);
  }

  /// libtorch's error shows this name if a program changes the node's output in place.
  std::string name() const override {
    return "fully_shard (forward of a unit must not change its arguments in place: clone them "
           "first)";
  }

  GradientHook callback;
};

bool needs_gradient(const at::Tensor* tensor) {
  return tensor->defined() && tensor->requires_grad();
}

/// Calls `callback` when backward has computed the gradients of all `tensors`. Replaces the tensors
/// by views; in-place changes of the views throw. Does nothing if no tensor requires a gradient.
void call_after_backward(nn::TensorList tensors, GradientHook callback) {
  // Only tensors that need a gradient become inputs of the node.
  variable_list inputs;
  for (const at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      inputs.push_back(*tensor);
    }
  }
  if (inputs.empty()) {
    return;
  }
  const auto node = tessera::detail::make_node<CallAfter>(std::move(callback));
  tessera::detail::set_inputs(*node, inputs);
  for (at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      *tensor = tessera::detail::guarded_view(*tensor);
      tessera::detail::set_node(*tensor, node);
    }
  }
}

/// Calls `callback` each time backward reaches one of `tensors`. Returns false if no tensor
/// requires a gradient.
bool call_before_backward(nn::TensorList tensors, const std::function<void()>& callback) {
  bool any = false;
  for (const at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      // Every result gets a hook, because backward can reach any result first and can skip results.
      // pre_backward() ignores later calls.
      tessera::detail::add_own_hook(*tensor, tessera::detail::OwnHook::kNotice,
                                    [callback](const at::Tensor& gradient) {
                                      callback();
                                      return gradient;
                                    });
      any = true;
    }
  }
  return any;
}

// A unit's hooks run around forward and backward of its modules: they gather, prefetch, free and
// reduce. Each hook first checks UnitPhase, because recomputation and create_graph also run hooks.

/// Starts the all-gathers of the `units` that still exist, and does not wait for them.
void start_unshard_all(const std::vector<std::weak_ptr<Unit>>& units) {
  for (const std::weak_ptr<Unit>& unit : units) {
    if (const std::shared_ptr<Unit> alive = unit.lock()) {
      alive->start_unshard();
    }
  }
}

/// Adds the operation `what` and the unit's name to the message of a libtorch exception in `act`.
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
  // A unit has an FQN only when its root is known. Until then its label is the class of its module.
  settings->label = detail::concat("a unit of ", spec.modules.front()->name());
  settings->reshard_after_forward = spec.options.reshard_after_forward;
  // With post_forward_mesh_size, the root unit also frees its parameters after forward by default.
  if (spec.options.post_forward_mesh_size > 1) {
    settings->reshard_after_forward = spec.options.reshard_after_forward.value_or(true);
  }
  return settings;
}

}  // namespace

void move_inputs(nn::TensorList inputs, c10::Device device) {
  for (at::Tensor* input : inputs) {
    if (is_elsewhere(*input, device)) {
      *input = input->to(device);
    }
  }
}

void move_buffers(const std::vector<nn::ModuleBase*>& modules, c10::Device device,
                  const std::unordered_set<nn::SlotPtr>& ignored) {
  // Autograd must not record the move of a buffer.
  const c10::AutoGradMode no_grad(false);
  const auto move = [&](const std::string&, torch::nn::Module& module) {
    move_buffers_of(module, device, ignored);
  };
  for (nn::ModuleBase* module : modules) {
    nn::visit_modules(*module, move, outside_of_units());
  }
}

Unit::Unit(const UnitSpec& spec)
    : modules_(spec.modules),
      mp_policy_(spec.options.mp_policy),
      in_buckets_(reduces_in_buckets(spec)),
      ignored_(spec.options.ignored),
      settings_(initial_settings(spec)),
      mesh_(spec.mesh) {
  // Parameter groups are made once: a conversion changes a group's layout but not its parameters.
  for (const std::vector<ParameterSpec>& parameters : grouped(spec)) {
    groups_.emplace_back(parameters, mp_policy_, spec.options.post_forward_mesh_size, settings_);
  }
  buckets_left_ = groups_.size();
  // An expert's parameter, for example, differs between the ranks of the unit's mesh, so a gradient
  // norm includes all these ranks. A distributed tensor whose mesh contains the unit's mesh is a
  // single tensor.
  for (const ParameterSpec& parameter : spec.parameters) {
    if (parameter.mesh.all != mesh_.all && !is_slice(mesh_.all, parameter.sharding.mesh)) {
      parameter.slot->set_distinct_along(mesh_.all);
    }
  }
}

void Unit::install() {
  // The modules own this unit and the hooks, so the hooks can capture a raw pointer.
  for (nn::ModuleBase* module : modules_) {
    constexpr auto kCalls = nn::HookedCalls::kEveryMethod;
    module->add_forward_pre_hook([this](auto&, nn::TensorList inputs) { pre_forward(inputs); },
                                 kCalls);
    module->add_forward_hook(
        [this](auto& self, nn::TensorList outputs) { post_forward(self, outputs); }, kCalls);
    module->add_always_hook([this] { end_call(); }, kCalls);
  }
}

std::vector<std::shared_ptr<Unit>> Unit::units_of_iteration() {
  return iteration_ != nullptr ? iteration_->units() : std::vector{shared_from_this()};
}

bool Unit::runs_forward() const {
  return phase_ == UnitPhase::kForward || phase_ == UnitPhase::kForwardRecorded;
}

void Unit::reset_to_idle() {
  if (phase() != UnitPhase::kIdle) {
    enter(UnitPhase::kIdle);
  }
}

void Unit::start_unshard() {
  if (phase_ == UnitPhase::kNew) {
    prepare();
  }
  const bool began = naming("all-gather", label(), [this] { return start_gathers(); });
  if (began && iteration_ != nullptr) {
    iteration_->began_gather(*this);
  }
}

void Unit::unshard() {
  start_unshard();
  each(&GatheredState::unshard, comm_context());
  each(&GatheredState::install_unsharded);
}

void Unit::reshard() {
  each(&GatheredState::reshard, comm_context());
  free_idle_buffers();
}

/// Within an iteration the buffers stay in the pool; the end of the iteration frees them.
void Unit::free_idle_buffers() {
  if (iteration_ == nullptr || !iteration_->is_under_way()) {
    comm_context().pool().clear();
  }
}

/// Warns once if ranks had different numbers of batch rows and unweighted losses in the previous
/// training forward. The warning comes late, because the program weights its loss after forward.
void Unit::warn_of_uneven_rows() {
  const auto [least, most] = random_agreement_.rows();
  const bool said = settings_->gradient_divisor || nn::weighs_ranks();
  if (least == most || said || std::exchange(warned_of_rows_, true)) {
    return;
  }
  TORCH_WARN("the ranks pass different numbers of rows to ", label(), ", ", least, " to ", most,
             ": if each rank's loss is the mean over its own rows, the averaged gradient is not "
             "the mean over all rows; multiply the loss by fsdp::mean_weight(rows, mesh), or pass "
             "CrossEntropyOptions::over (if the loss is a sum, call set_gradient_divide_factor)");
}

/// Begins a scope in which random operators draw numbers by global batch row. The batch is the
/// root's input or, without a root, the unit's input.
void Unit::begin_random_region(nn::TensorList inputs) {
  const detail::RandomRegionPtr& outer = detail::random_region();
  const std::shared_ptr<detail::BatchRows> known = outer != nullptr ? outer->rows() : nullptr;
  if (known != nullptr && (known->is_given() || !is_root())) {
    return;
  }
  const auto batch = std::ranges::find_if(
      inputs, [](const at::Tensor* tensor) { return tensor->defined() && tensor->dim() > 0; });
  const auto sizes = batch != inputs.end() ? std::optional((*batch)->sizes().vec()) : std::nullopt;
  const std::vector<DeviceMesh> dims = mesh_.data_dims();
  const auto rows = std::make_shared<detail::BatchRows>(dims, sizes);
  random_regions_.back() = std::make_unique<detail::RandomRegionScope>(
      std::make_shared<detail::RandomRegion>(outer, rows));
  // Only a root's training forward exchanges the numbers of batch rows: a replica can evaluate
  // alone, and a recomputation reuses random numbers. After an abandoned iteration, other ranks may
  // call other collectives.
  const bool trains = modules_.front()->is_training() && c10::GradMode::is_enabled();
  if (!is_root() || !trains || nn::is_recomputing()) {
    return;
  }
  nn::set_batch_ranks(mesh_.ranks());
  warn_of_uneven_rows();
  if (!follows_abandoned_) {
    random_agreement_.begin_forward(modules_, dims, rows, sizes ? sizes->front() : 0,
                                    [this] { return iteration_->groups_on(mesh_.all); });
  }
}

void Unit::end_call() {
  // random_regions_ is empty if another hook threw before pre_forward() ran.
  if (!random_regions_.empty()) {
    random_regions_.pop_back();
  }
}

void Unit::pre_forward(nn::TensorList inputs) {
  random_regions_.emplace_back();
  // Activation checkpointing recomputes a part of the forward, sometimes before backward has
  // reached the unit's results.
  if (nn::is_recomputing()) {
    pre_backward(nullptr);
  } else if (phase() != UnitPhase::kBackward || iteration_->backward_failed()) {
    enter_as_root();
  }
  begin_random_region(inputs);
  if (is_root()) {
    // Only the root moves inputs to the device, because the inputs of inner units are on the device
    // already.
    move_inputs(inputs, mesh_.device());
  }
  if (mp_policy_.restore_input_dtype) {
    restored_dtype_ = floating_type(inputs);
  }
  if (mp_policy_.cast_forward_inputs) {
    cast_floating(inputs, mp_policy_.param_dtype);
  }
  const OperatorModePause pause;
  if (phase_ == UnitPhase::kBackward) {
    unshard();
    if (nn::is_recomputing()) {
      // A recomputation must add the same autograd node as forward: a tensor-parallel matrix
      // product looks up the node that made its input.
      call_after_backward(inputs, [](nn::TensorList) {});
    }
  } else if (!runs_forward()) {
    begin_forward(inputs);
  }
}

void Unit::begin_forward(nn::TensorList inputs) {
  unshard();
  std::ranges::for_each(groups(), &ParameterGroup::begin_use);
  // All all-gathers share one stream. This unit is needed first, so other units are prefetched
  // after this unit's all-gather has started.
  prefetch_for_forward();
  enter(UnitPhase::kForward);
  if (to_run_.empty()) {
    to_run_.insert(modules_.begin(), modules_.end());
  }
  // In backward this hook reduces the unit's gradients. If no input needs a gradient, there is no
  // hook, and end_backward() reduces the gradients.
  if (c10::GradMode::is_enabled()) {
    call_after_backward(inputs, [unit = shared_from_this()](nn::TensorList gradients) {
      unit->post_backward(gradients);
    });
  }
}

/// The all-gather of the next unit overlaps this unit's computation. The first forward prefetches
/// nothing, because the order of the units is unknown.
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
  // If a registered method has called forward, this forward has already changed the phase.
  if (!runs_forward()) {
    enter(phase_ == UnitPhase::kAwaitingBackward ? UnitPhase::kForwardRecorded
                                                 : UnitPhase::kForward);
  }
  await_backward(outputs);
  to_run_.erase(&module);
  if (to_run_.empty()) {
    ran_all_ = true;
    end_forward();
  }
}

void Unit::await_backward(nn::TensorList outputs) {
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  // The autograd graph of the results owns the token: the token expires with the graph.
  const auto token = std::make_shared<RecordedCall>();
  for (const at::Tensor* output : outputs) {
    if (output->defined() && output->grad_fn() != nullptr) {
      token->results.push_back(output->grad_fn().get());
    }
  }
  const bool hooked = call_before_backward(
      outputs, [unit = shared_from_this(), token] { unit->pre_backward(token.get()); });
  std::erase_if(recorded_calls_, [](const auto& call) { return call.expired(); });
  recorded_calls_.push_back(token);
  // A unit of several modules enters the forward order once, at its first module with a result that
  // needs a gradient.
  if (!hooked || phase_ == UnitPhase::kForwardRecorded) {
    return;
  }
  iteration_->ran_forward(*this, token);
  enter(UnitPhase::kForwardRecorded);
}

void Unit::end_partial_forward() {
  if (to_run_.empty()) {
    return;
  }
  // The program can skip a module intentionally, so this is a warning, printed once.
  if (!ran_all_ && !std::exchange(warned_, true)) {
    TORCH_WARN(label(), ": ", to_run_.size(), " of its ", modules_.size(),
               " modules, for example a ", (*to_run_.begin())->name(),
               ", did not run in a forward of the root unit; all modules of a unit must run in "
               "each forward");
  }
  to_run_.clear();
  if (runs_forward()) {
    end_forward();
  } else if (phase_ != UnitPhase::kBackward) {
    // In phase kBackward, a backward between two modules of the unit needs the parameters.
    free_after_forward();
  }
}

void Unit::end_forward() {
  const std::string lost = lost_write("forward of " + label());
  TESSERA_CHECK(lost.empty(), lost, " (for torch::nn::Embedding: leave out max_norm)");
  // IterationState::end_forward() reads the phase, so the phase changes first.
  enter(phase_ == UnitPhase::kForwardRecorded ? UnitPhase::kAwaitingBackward : UnitPhase::kIdle);
  if (is_root()) {
    iteration_->end_forward(/*backward_comes=*/phase_ == UnitPhase::kAwaitingBackward);
  }
  free_after_forward();
  free_idle_buffers();
}

void Unit::free_after_forward() {
  if (phase() != UnitPhase::kAwaitingBackward) {
    each(&GatheredState::reshard, comm_context());
  } else if (settings_->reshard_after_forward.value_or(!is_root())) {
    each(&GatheredState::reshard_for_now, comm_context());
  } else {
    install_sharded();
  }
}

/// Whether the running backward will also reach another call of this unit. Gradients are complete
/// only after the last of these calls.
bool Unit::is_called_again() const {
  const int backward = tessera::detail::backward_id();
  return std::ranges::any_of(recorded_calls_, [&](const std::weak_ptr<RecordedCall>& recorded) {
    const std::shared_ptr<RecordedCall> call = recorded.lock();
    return call != nullptr && call->backward != backward &&
           std::ranges::any_of(call->results, tessera::detail::is_in_backward);
  });
}

void Unit::pre_backward(RecordedCall* call) {
  if (call != nullptr) {
    call->backward = tessera::detail::backward_id();
  }
  if (phase_ == UnitPhase::kBackward) {
    return;
  }
  enter(UnitPhase::kBackward);
  iteration_->enter_backward();
  if (settings_->unshard_in_backward || unsharded()) {
    unshard();
  }
  // The reductions must finish before prefetch_for_backward() allocates memory, because packed
  // gradients use memory too.
  comm_context().finish_reductions();
  // finish_reductions() calls the program's hooks, so accumulated gradients are restored
  // afterwards.
  each(&GradientState::restore_accumulated_grads);
  begin_buckets();
  prefetch_for_backward();
}

void Unit::prefetch_for_backward() {
  const std::shared_ptr<Unit> before = iteration_->ran_before(*this);
  if (!settings_->backward_prefetch.empty()) {
    start_unshard_all(settings_->backward_prefetch);
  } else if (before != nullptr && before->settings_->unshard_in_backward) {
    before->start_unshard();
  }
}

void Unit::post_backward(nn::TensorList gradients) {
  if (phase_ == UnitPhase::kBackward) {
    enter(UnitPhase::kIdle);
    awaits_call_ = is_called_again();
    awaits_call_ ? free_after_backward() : settle_gradients();
  }
  // With create_graph, the graph of the gradients reads the parameters, and a later backward
  // gathers the unit again.
  call_before_backward(gradients, [unit = shared_from_this()] { unit->pre_backward(nullptr); });
}

// Under replicate(), a unit's parameter groups are called buckets. Without buckets, a model that is
// one unit would be reduced only at the end of backward.

/// Buckets are reduced early only if no other unit runs backward; otherwise ranks could call
/// collectives in different orders. Parameter hooks prevent early reduction, because hooks can
/// write parameters that backward still reads.
void Unit::begin_buckets() {
  const int backward = tessera::detail::backward_id();
  if (buckets_backward_ >= 0 && buckets_backward_ == backward) {
    return;  // the unit ran twice: some buckets can be reduced already
  }
  noted_.clear();
  buckets_left_ = groups().size();
  const bool early = in_buckets() && iteration_->is_alone() &&
                     std::ranges::none_of(groups(), [](const ParameterGroup& group) {
                       return std::ranges::any_of(group.parameters(), &ShardedParameter::has_hooks);
                     });
  buckets_backward_ = early ? backward : -1;
}

/// Autograd calls note_gradient() before the gradient of `parameter` is added to `.grad`, so the
/// parameter's bucket is reduced in a later call.
void Unit::note_gradient(const ShardedParameter& parameter) {
  if (phase_ != UnitPhase::kBackward || !settings_->gradient_sync || buckets_backward_ < 0 ||
      buckets_backward_ != tessera::detail::backward_id()) {
    return;
  }
  while (buckets_left_ > 0 && is_complete(groups()[buckets_left_ - 1])) {
    naming("reduction", label(), [this] { comm_context().reduce({&groups()[--buckets_left_]}); });
  }
  noted_.insert(&parameter);
}

bool Unit::is_complete(const ParameterGroup& bucket) const {
  return std::ranges::all_of(bucket.parameters(), [this](const ShardedParameter& parameter) {
    return !parameter.trainable() || noted_.contains(&parameter);
  });
}

/// Returns the parameter groups without the buckets that are completely reduced already.
std::vector<ParameterGroup*> Unit::groups_to_reduce() {
  std::vector<ParameterGroup*> rest;
  for (std::size_t i = 0; i < groups().size(); ++i) {
    if (i < buckets_left_ || groups()[i].gradients().any_unsharded()) {
      rest.push_back(&groups()[i]);
    }
  }
  if (in_buckets_) {
    std::ranges::reverse(rest);
  }
  buckets_left_ = groups().size();
  buckets_backward_ = -1;
  return rest;
}

void Unit::settle_gradients() {
  // Unsharded parameters are freed first, so that reduction buffers can use the memory.
  free_after_backward();
  // The reduction is collective: all ranks reduce in the order in which backward leaves the units.
  naming("reduction", label(), [this] {
    settings_->gradient_sync ? comm_context().reduce(groups_to_reduce())
                             : each(&GradientState::set_aside);
  });
}

void Unit::end_backward() {
  const bool was_in_backward = phase_ == UnitPhase::kBackward;
  if (was_in_backward) {
    enter(UnitPhase::kIdle);
  }
  const bool awaited_call = std::exchange(awaits_call_, false);
  // The unit has unreduced gradients if its inputs need no gradient, or if parameters got gradients
  // after the inputs.
  const bool late = any(&GradientState::any_unsharded);
  const bool awaits = settings_->gradient_sync && any(&GradientState::awaits_reduction);
  if (was_in_backward || late || awaits || awaited_call) {
    settle_gradients();
  } else {
    free_after_backward();
  }
}

void Unit::free_after_backward() {
  settings_->reshard_after_backward ? each(&GatheredState::reshard, comm_context())
                                    : install_sharded();
}

}  // namespace tessera::fsdp
