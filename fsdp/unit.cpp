#include "unit.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backward_hooks.h"
#include "device_moves.h"
#include "mixed_precision.h"
#include "module_tree.h"
#include "parameter_agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/nn/checkpoint.h"
#include "unit_parameters.h"

namespace tessera::fsdp {
namespace {

/// Ends inference mode, if it is on, for as long as this lives.
class OutsideInferenceMode {
 public:
  OutsideInferenceMode() {
    if (c10::InferenceMode::is_enabled()) {
      off_.emplace(false);
    }
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

void start_unshard_all(const std::vector<std::weak_ptr<Unit>>& units) {
  for (const std::weak_ptr<Unit>& unit : units) {
    if (const std::shared_ptr<Unit> alive = unit.lock()) {
      alive->start_unshard();
    }
  }
}

}  // namespace

Unit::Unit(std::vector<nn::ModuleBase*> modules, const nn::NamedSlots& parameters,
           const DataMesh& mesh, const Options& options)
    : modules_(std::move(modules)),
      mesh_(mesh),
      mp_policy_(options.mp_policy),
      may_be_unused_(options.may_be_unused) {
  settings_.reshard_after_forward = options.reshard_after_forward;
  if (options.neighbours > 1 && !options.reshard_after_forward) {
    settings_.reshard_after_forward = true;
  }
  for (GroupParameters& group : shard_parameters(parameters, mesh, options)) {
    groups_.emplace_back(std::move(group.parameters), group.mesh, options, hooks_);
  }
  set_label(detail::concat("a unit of ", modules_.front()->name()));
}

/// With a shared context, what others reduce goes on.
Unit::~Unit() {
  forget_reductions();
}

void Unit::install() {
  // The modules own this, and the hooks are the modules'.
  for (nn::ModuleBase* module : modules_) {
    module->add_forward_pre_hook([this](auto&, nn::TensorList inputs) { pre_forward(inputs); });
    module->add_forward_hook(
        [this](auto& self, nn::TensorList outputs) { post_forward(self, outputs); });
  }
}

void Unit::set_gradient_divisor(double divisor) {
  for (ParameterGroup& group : groups_) {
    group.set_gradient_divisor(divisor);
  }
}

void Unit::set_all_reduce(bool all_reduce) {
  settings_.all_reduce = all_reduce;
  for (ParameterGroup& group : groups_) {
    group.set_all_reduce(all_reduce);
  }
}

void Unit::set_force_sum(bool force) {
  for (ParameterGroup& group : groups_) {
    group.set_force_sum(force);
  }
}

void Unit::set_unshard_async_op(bool async_op) {
  settings_.unshard_async_op = async_op;
  for (ParameterGroup& group : groups_) {
    group.set_unshard_async_op(async_op);
  }
}

void Unit::set_label(std::string label) {
  label_ = std::move(label);
  for (ParameterGroup& group : groups_) {
    group.set_label(label_);
  }
}

const CommunicationPtr& Unit::shared_communication() {
  if (communication_ == nullptr) {
    communication_ = std::make_shared<Communication>(comm::make_streams(mesh_.all.device_type()),
                                                     mesh_.device());
  }
  return communication_;
}

Communication& Unit::communication() {
  return *shared_communication();
}

void Unit::set_communication(CommunicationPtr communication) {
  if (communication_ != nullptr && communication_ != communication) {
    communication_->settle();
  }
  communication_ = std::move(communication);
}

void Unit::prepare() {
  // What is made here outlives the call: training needs it, too.
  const OutsideInferenceMode ordinary;
  if (!prepared_) {
    check_same_parameters(groups_, mesh_, label_);
  }
  for (ParameterGroup& group : groups_) {
    group.prepare(communication());
  }
  prepared_ = true;
}

bool Unit::unsharded() const {
  return std::ranges::all_of(groups_, &ParameterGroup::unsharded);
}

void Unit::await_compute() {
  if (context_ != nullptr && !context_->iteration_open()) {
    std::ranges::for_each(groups_, &ParameterGroup::drop_piece);
  }
  if (!settings_.unshard_async_op) {
    communication().streams().order(comm::Lane::kCompute, comm::Lane::kAllGather);
  }
}

void Unit::start_unshard() {
  if (!prepared_) {
    prepare();
  }
  const OutsideInferenceMode ordinary;  // buffers go to the pool
  for (ParameterGroup& group : groups_) {
    group.start_unshard(communication());
  }
}

void Unit::unshard() {
  start_unshard();
  for (ParameterGroup& group : groups_) {
    group.unshard(communication());
  }
}

void Unit::reshard() {
  for (ParameterGroup& group : groups_) {
    group.reshard(communication());
  }
}

void Unit::reshard_within_step() {
  for (ParameterGroup& group : groups_) {
    group.keeps_pieces() ? group.reshard_for_now(communication()) : group.reshard(communication());
  }
}

bool Unit::step_goes_on() const {
  return !settings_.last_backward || !settings_.gradient_sync || !settings_.all_reduce;
}

void Unit::end_micro_batch() {
  if (!step_goes_on()) {
    std::ranges::for_each(groups_, &ParameterGroup::drop_piece);
  }
}

void Unit::make_context() {
  TESSERA_CHECK(modules_.size() == 1,
                "forward of a module that is a unit together with others was called before that "
                "of the root; apply fully_shard to the module that holds them and call that");
  const nn::ModuleBase& root = *modules_.front();
  const std::vector<std::shared_ptr<Unit>> units = units_of(root, true);
  context_ = std::make_shared<Context>(units);
  const ModuleTree tree(root, false);
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->context_ = context_;
    unit->is_root_ = unit.get() == this;
    unit->set_communication(shared_communication());
    // Of its modules, the first below the root: others may be elsewhere.
    const auto below = std::ranges::find_if(
        unit->modules_, [&](const nn::ModuleBase* module) { return tree.fqn_of(module); });
    unit->set_label(unit->is_root_ ? "the root unit" : "unit '" + *tree.fqn_of(*below) + "'");
  }
}

void Unit::enter_as_root() {
  if (context_ == nullptr) {
    make_context();
  }
  if (is_root_) {
    context_->begin_forward();
  } else if (!context_->iteration_open()) {
    await_compute();
  }
}

void Unit::abandon_iteration() {
  std::ranges::for_each(groups_, &ParameterGroup::drop_gradients);
  reshard_within_step();
}

void Unit::begin_iteration() {
  in_backward_ = false;
  to_run_.clear();
  prepare();
  if (may_be_unused_) {
    unshard();
  }
}

void Unit::pre_forward(nn::TensorList inputs) {
  // Activation checkpointing runs a part of the forward again, maybe before the gradient of this
  // unit's results has come.
  if (nn::is_recomputing()) {
    pre_backward();
  } else if (!in_backward_ || !backward_runs()) {  // or left so by a backward that failed
    enter_as_root();
  }
  if (is_root_) {
    move_inputs(inputs, mesh_.device());
  }
  if (mp_policy_.restore_input_dtype) {
    restored_dtype_ = floating_type(inputs);
  }
  if (mp_policy_.cast_forward_inputs) {
    cast_floating(inputs, mp_policy_.param_dtype);
  }
  const OperatorModePause pause;  // a policy is asked of the model's own operators
  if (in_backward_) {
    unshard();
  } else if (to_run_.empty()) {
    begin_forward(inputs);
  }
}

void Unit::begin_forward(nn::TensorList inputs) {
  unshard();
  start_unshard_all(settings_.forward_prefetch);
  to_run_.insert(modules_.begin(), modules_.end());
  backward_comes_ = false;
  if (c10::GradMode::is_enabled()) {
    call_after_backward(inputs, [unit = shared_from_this()](nn::TensorList gradients) {
      unit->post_backward(gradients);
    });
  }
}

void Unit::post_forward(nn::ModuleBase& module, nn::TensorList outputs) {
  cast_floating(outputs, mp_policy_.output_dtype ? mp_policy_.output_dtype : restored_dtype_);
  if (in_backward_) {
    return;
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
  const auto token = std::make_shared<char>();
  const bool hooked =
      call_before_backward(outputs, [unit = shared_from_this(), token] { unit->pre_backward(); });
  // A unit that only some ranks ran must not change what they prefetch.
  if (hooked && !backward_comes_ && !may_be_unused_) {
    context_->ran_forward(*this, token);
  }
  backward_comes_ = backward_comes_ || hooked;
}

void Unit::end_partial_forward() {
  if (to_run_.empty()) {
    return;
  }
  if (!std::exchange(warned_, true)) {
    TORCH_WARN(label_, ": ", to_run_.size(), " of its ", modules_.size(), " modules, one a ",
               (*to_run_.begin())->name(), ", did not run in a forward of the root; modules that ",
               "fully_shard made one unit must all run in each forward");
  }
  to_run_.clear();
  end_forward();
}

void Unit::drop_kept_gradient(const nn::ParameterSlot& slot) {
  for (ParameterGroup& group : groups_) {
    group.drop_kept_gradient(slot);
  }
}

void Unit::forget_reductions() {
  if (communication_ != nullptr) {
    communication_->forget(groups_);
  }
}

void Unit::end_forward() {
  if (is_root_) {
    context_->end_forward();
  }
  if (is_root_ && !backward_comes_) {
    context_->end_iteration();
  } else if (may_be_unused_) {
    return;  // until backward ends
  } else if (!backward_comes_) {
    reshard_within_step();
  } else if (settings_.reshard_after_forward.value_or(!is_root_)) {
    for (ParameterGroup& group : groups_) {
      group.reshard_for_now(communication());
    }
  }
}

void Unit::pre_backward() {
  if (in_backward_) {
    return;
  }
  in_backward_ = true;
  context_->enter_backward();
  if (settings_.unshard_in_backward) {
    unshard();
  }
  // Before more is gathered: what is left of the reduction is packed gradients.
  communication().finish_reductions();
  prefetch_for_backward();
}

void Unit::prefetch_for_backward() {
  const std::shared_ptr<Unit> before = context_->ran_before(*this);
  if (!settings_.backward_prefetch.empty()) {
    start_unshard_all(settings_.backward_prefetch);
  } else if (before != nullptr && before->settings_.unshard_in_backward) {
    before->start_unshard();
  }
}

void Unit::post_backward(nn::TensorList gradients) {
  if (in_backward_ && !may_be_unused_) {
    in_backward_ = false;
    settle_gradients();
  }
  // Where backward made a graph (create_graph), that of the gradients reads the parameters again.
  call_before_backward(gradients, [unit = shared_from_this()] { unit->pre_backward(); });
}

void Unit::settle_gradients() {
  if (settings_.reshard_after_backward) {
    reshard_within_step();
  }
  if (settings_.gradient_sync) {
    communication().reduce(groups_);
  } else {
    std::ranges::for_each(groups_, &ParameterGroup::keep_gradients);
  }
}

void Unit::end_backward() {
  // A unit whose inputs need no gradient, or whose parameters got theirs after the inputs did.
  const bool late = std::ranges::any_of(groups_, &ParameterGroup::has_gradients);
  // Or one that only an earlier micro-batch used.
  const bool awaits =
      settings_.gradient_sync && std::ranges::any_of(groups_, &ParameterGroup::awaits_reduction);
  if (std::exchange(in_backward_, false) || late || awaits || may_be_unused_) {
    settle_gradients();
  } else if (settings_.reshard_after_backward) {
    reshard_within_step();
  }
}

}  // namespace tessera::fsdp
