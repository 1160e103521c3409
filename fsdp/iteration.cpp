// The training iteration of a root unit and the units below the root. Do not reorder steps in
// begin_forward() and end_backward(): units, the buffer pool and other ranks rely on the order.

#include "unit.h"

#include <c10/core/GradMode.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "tessera/comm/world.h"
#include "tessera/core/detail/environment.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

namespace {

/// Counts the iterations in progress for each World (rank).
class OpenIterations {
 public:
  static OpenIterations& instance() {
    static auto* const all = new OpenIterations;  // never freed: threads can use `all` after main()
    return *all;
  }

  int add(const comm::World* rank, int change) {
    const std::lock_guard lock(mutex_);
    const int count = counts_[rank] += change;
    if (count == 0) {
      counts_.erase(rank);
    }
    return count;
  }

 private:
  std::mutex mutex_;
  std::map<const comm::World*, int> counts_;
};

}  // namespace

IterationState::IterationState(const std::vector<std::shared_ptr<Unit>>& units)
    : units_(units.begin(), units.end()), rank_(units.front()->mesh().all.world().get()) {}

IterationState::~IterationState() {
  if (is_open()) {
    OpenIterations::instance().add(rank_, -1);
  }
}

/// Whether the model has only one unit, and no second root unit has an iteration in progress. Two
/// roots can take part in one backward and share process groups.
bool IterationState::is_alone() const {
  return units().size() == 1 && OpenIterations::instance().add(rank_, 0) == 1;
}

/// Returns only the units that still exist: the program can destroy a part of the model.
std::vector<std::shared_ptr<Unit>> IterationState::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (const std::weak_ptr<Unit>& unit : units_) {
    if (std::shared_ptr<Unit> locked = unit.lock()) {
      alive.push_back(std::move(locked));
    }
  }
  return alive;
}

CommContext& IterationState::comm_context() const {
  return units().front()->comm_context();
}

bool IterationState::is_open() const {
  return phase() != IterationPhase::kIdle;
}

/// Returns false if set_is_last_backward(false) was called for any unit: the reductions of all
/// units then stay in progress.
bool IterationState::is_last_backward() const {
  return std::ranges::all_of(units(),
                             [](const auto& unit) { return unit->settings().last_backward; });
}

void IterationState::enter(IterationPhase next) {
  const std::shared_ptr<Unit> root = units_.front().lock();
  const bool was_open = is_open();
  phase_.enter(next, "the iteration of " + (root ? root->label() : "a root that is gone"));
  if (was_open != is_open()) {
    OpenIterations::instance().add(rank_, was_open ? -1 : 1);
  }
}

template <class Act>
void IterationState::for_each_group(Act&& act) const {
  for (const std::shared_ptr<Unit>& unit : units()) {
    for (ParameterGroup& group : unit->groups()) {
      act(group);
    }
  }
}

std::vector<const ParameterGroup*> IterationState::groups_on(const DeviceMesh& mesh) const {
  std::vector<const ParameterGroup*> groups;
  for_each_group([&](const ParameterGroup& group) {
    if (is_slice(group.mesh().all, mesh)) {
      groups.push_back(&group);
    }
  });
  return groups;
}

/// Whether the backward of this iteration has thrown. Autograd drops the token `backward_` after an
/// exception, but possibly late, so the function also checks whether backward runs on this thread.
bool IterationState::backward_failed() const {
  return phase() == IterationPhase::kBackward &&
         (backward_.expired() || tessera::detail::backward_id() < 0);
}

bool IterationState::calls_root() const {
  const std::shared_ptr<Unit> root = units_.front().lock();
  return root != nullptr && root->is_called();
}

void IterationState::forget_failure() {
  if (!is_open() || is_under_way() || calls_root()) {
    return;
  }
  if (backward_failed()) {  // after a failed forward, reductions of earlier backwards go on
    forget_reductions();
  }
  close();
  std::ranges::for_each(units(), [](const auto& unit) { unit->abandon_iteration(); });
}

bool IterationState::begin_forward() {
  // is_open() is read before the phase changes. abandon_iteration() drops gathered memory and
  // unsharded gradients of an iteration that is still open.
  const bool abandons = is_open();
  if (backward_failed()) {
    forget_reductions();
    enter(IterationPhase::kIdle);
  }
  TESSERA_CHECK(
      phase() != IterationPhase::kBackward, "forward of ", units().front()->label(),
      " was called within its own backward, from a hook or an autograd function for "
      "example; call forward before or after backward, or let nn::checkpoint repeat the forward");
  enter(IterationPhase::kForward);
  // Removes the entries of forwards whose autograd graph was dropped. In a pipeline, other earlier
  // forwards still need their entries for backward.
  std::erase_if(forward_order_, [](const Ran& ran) { return ran.token.expired(); });
  await_update();
  if (abandons) {
    std::ranges::for_each(units(), [](const auto& unit) { unit->abandon_iteration(); });
  }
  settle_gathered();
  gather_order_.begin();
  std::ranges::for_each(units(), [](const auto& unit) { unit->begin_iteration(); });
  return abandons;
}

/// The gathers of this forward wait until the optimizer has updated the shards.
void IterationState::await_update() {
  comm::Streams& streams = comm_context().streams();
  const auto event = std::exchange(units().front()->settings().post_optim_event, std::nullopt);
  streams.wait(comm::Lane::kAllGather, event ? *event : streams.record(comm::Lane::kCompute));
}

/// A parameter group stays gathered if no rank has written to its shards.
void IterationState::settle_gathered() {
  std::vector<ParameterGroup*> keeping;
  for_each_group([&](ParameterGroup& group) {
    GatheredState& gathered = group.gathered();
    gathered.drop_piece();  // frees a cached part that no backward has used
    if (gathered.holds_copies()) {
      keeping.push_back(&group);
    }
  });
  free_outdated(keeping, comm_context());
}

void IterationState::began_gather(Unit& unit) {
  if (phase() == IterationPhase::kForward) {
    gather_order_.gathered(unit.shared_from_this());
  }
}

std::shared_ptr<Unit> IterationState::gather_ahead(Unit& unit) {
  if (phase() != IterationPhase::kForward || !gather_order_.used(unit.shared_from_this())) {
    return nullptr;
  }
  const std::shared_ptr<Unit> ahead = ahead_.lock();
  if (ahead != nullptr && ahead->any(&GatheredState::is_gathering)) {
    return nullptr;
  }
  std::shared_ptr<Unit> next = gather_order_.next();
  ahead_ = next;
  return next;
}

/// Frees the unit that was prefetched last if this forward has not used the unit.
void IterationState::free_unused() const {
  if (const std::shared_ptr<Unit> ahead = ahead_.lock()) {
    ahead->each(&GatheredState::reshard_unused, comm_context());
  }
}

/// `token` expires if the autograd graph of this forward is dropped. Backward then does not
/// prefetch `unit`.
void IterationState::ran_forward(Unit& unit, const std::shared_ptr<void>& token) {
  forward_order_.push_back({&unit, token});
}

void IterationState::end_forward(bool backward_comes) {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->end_partial_forward();
  }
  free_unused();
  // If ranks have gathered different units, all ranks throw here; otherwise a rank would wait
  // forever in backward.
  agree_on_gathers();
  gather_order_.end();
  if (phase() == IterationPhase::kBackward) {  // a backward that ran within this forward has failed
    forget_reductions();
  }
  if (backward_comes) {
    enter(IterationPhase::kAwaitingBackward);
  } else {
    end_iteration();
  }
}

/// Checks that the ranks of each sharding group called the same all-gathers. Replicas can run
/// different forwards, because forward calls no collectives over replicas.
void IterationState::agree_on_gathers() {
  std::vector<comm::Communicator*> sharding;
  for_each_group([&](ParameterGroup& group) { group.gathered().add_groups(sharding); });
  try {
    agree_on_calls(sharding, {});
  } catch (...) {
    for_each_group([&](ParameterGroup& group) { group.gathered().discard(comm_context()); });
    throw;
  }
}

void IterationState::end_iteration() {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->reshard();
  }
  // No backward follows, so no reduction will use the idle buffers.
  comm_context().pool().clear();
  close();
}

void IterationState::close() {
  if (is_open()) {
    enter(IterationPhase::kIdle);
  }
}

void IterationState::forget_reductions() const {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->forget_reductions();
  }
}

void IterationState::enter_backward() {
  if (phase() != IterationPhase::kBackward) {
    enter(IterationPhase::kBackward);
    // When a backward throws, autograd drops its callbacks and the token expires.
    const auto token = std::make_shared<char>();
    backward_ = token;
    // `self` keeps this iteration alive: the program can destroy the model during backward.
    tessera::detail::call_at_end_of_backward(
        [self = shared_from_this(), token] { self->end_backward(); });
  }
}

std::shared_ptr<Unit> IterationState::ran_before(const Unit& unit) {
  const auto ran = std::find_if(forward_order_.rbegin(), forward_order_.rend(),
                                [&](const Ran& entry) { return entry.unit == &unit; });
  if (ran == forward_order_.rend()) {
    return nullptr;
  }
  // Backward visits units in the reverse order of forward: units after `unit` have finished.
  forward_order_.erase(ran.base() - 1, forward_order_.end());
  // An expired token: the graph of that forward was dropped, so its unit need not be gathered. A
  // valid token keeps the unit alive.
  const bool known = !forward_order_.empty() && !forward_order_.back().token.expired();
  return known ? forward_order_.back().unit->shared_from_this() : nullptr;
}

void IterationState::end_backward() {
  const std::vector<std::shared_ptr<Unit>> all = units();
  std::for_each(all.rbegin(), all.rend(), [](const auto& unit) { unit->end_backward(); });
  // If more backwards follow (set_is_last_backward), reductions stay in progress.
  const bool last = is_last_backward();
  if (last) {
    comm_context().finish_reductions();
  }
  agree_on_gradients();
  if (last) {
    comm_context().settle();
    std::vector<ParameterGroup*> groups;
    for_each_group([&](ParameterGroup& group) { groups.push_back(&group); });
    agree_on_use(groups);
  } else {
    for_each_group([](ParameterGroup& group) { group.gradients().mark_expected(); });
  }
  forward_order_.clear();
  close();
  if (last && tessera::detail::debug_checks()) {
    for (const std::shared_ptr<Unit>& unit : all) {
      unit->compare_copies();
    }
  }
}

/// Checks that all ranks reduced the same gradients. If not, drops all gradients, because wrong
/// sums can have been added to correct gradients.
void IterationState::agree_on_gradients() {
  std::vector<comm::Communicator*> sharding;
  std::vector<comm::Communicator*> replicating;
  for_each_group([&](ParameterGroup& group) {
    group.gathered().add_groups(sharding);
    group.add_replica_groups(replicating);
  });
  try {
    agree_on_calls(sharding, replicating);
  } catch (...) {
    forget_reductions();
    for_each_group([&](ParameterGroup& group) {
      group.gradients().drop_all();
      group.gathered().discard(comm_context());
    });
    forward_order_.clear();
    close();
    throw;
  }
}

// Functions of Unit that find units below a root, begin or abandon an iteration, and reject illegal
// calls.

namespace {

/// Throws Error if `module` or a submodule has trainable parameters in no unit and not in
/// Options::ignored. The gradients of such parameters would not be reduced. `mesh` and `again` are
/// for the message. Not collective.
void refuse_forgotten_parameters(const nn::ModuleBase& module, const DataMesh& mesh, bool again) {
  std::unordered_set<nn::SlotPtr> meant;
  for (const std::shared_ptr<Unit>& unit : units_of(module, /*recurse=*/true)) {
    meant.insert(unit->ignored().begin(), unit->ignored().end());
  }
  std::vector<std::string> forgotten;
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& below) {
    for (const auto& [name, slot] : below.slots()) {
      // A parameter slot (nn::ParameterSlot) with a persistent tensor belongs to a unit.
      if (slot->get().requires_grad() && !slot->has_persistent() && !meant.contains(slot)) {
        forgotten.push_back(nn::detail::join_fqn(fqn, name));
      }
    }
  });
  TESSERA_CHECK(
      forgotten.empty(), "forward of a ", module.name(), ": ", forgotten.size(),
      " of its parameters require gradients but belong to no FSDP unit (", nn::first_of(forgotten),
      "), so each of the ", mesh.ranks(), " ranks would train its own copy; ",
      again ? "units ignore parameters that are registered, replaced or unfrozen (requires_grad_) "
              "after the first forward: complete and unfreeze the model before fully_shard"
            : "register all modules before you apply fully_shard or replicate to the model",
      "; or freeze the parameters, or name them in Options::ignored of a unit");
}

void mix(std::uint64_t& hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
  hash ^= hash >> 32U;
}

/// Adds to `hash` which parameters of `module` and its submodules are trainable, and which are in a
/// unit. Called in every forward.
void mix_slots(std::uint64_t& hash, const torch::nn::Module& module) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    for (const auto& [name, slot] : ours->slots()) {
      mix(hash, reinterpret_cast<std::uintptr_t>(slot.get()));
      mix(hash, (slot->get().requires_grad() ? 1U : 0U) + (slot->has_persistent() ? 2U : 0U));
    }
  }
  for (const std::shared_ptr<torch::nn::Module>& child : module.children()) {
    mix_slots(hash, *child);
  }
}

}  // namespace

void Unit::make_iteration() {
  TESSERA_CHECK(modules_.size() == 1,
                "forward of a unit of several modules was called without a root unit; apply "
                "fully_shard to the module that holds all of them, and call that module");
  // A unit that is called before its root is known becomes a root. A later call of the real root
  // makes the unit part of the root's IterationState.
  const nn::ModuleBase& root = *modules_.front();
  const std::vector<std::shared_ptr<Unit>> units = units_of(root, true);
  iteration_ = std::make_shared<IterationState>(units);
  std::unordered_map<const nn::ModuleBase*, std::string> names;
  nn::visit_modules(root, [&](const std::string& fqn, const nn::ModuleBase& module) {
    names.emplace(&module, fqn);
  });
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->iteration_ = iteration_;
    unit->set_comm_context(shared_comm_context());
    // The loss is the mean over all ranks with different data. Expert parameters are reduced over
    // fewer ranks but have the same divisor.
    for (ParameterGroup& group : unit->groups_) {
      if (is_slice(group.mesh().all, mesh_.all)) {
        group.gradients().set_batch_ranks(mesh_.ranks());
      }
    }
    // The label is an FQN relative to the root: the FQN of the unit's first module inside the root.
    const auto below = std::ranges::find_if(
        unit->modules_, [&](const nn::ModuleBase* module) { return names.contains(module); });
    unit->settings_->label = unit->is_root() ? "the root unit" : "unit '" + names.at(*below) + "'";
  }
}

/// Returns an error message if a write to an unsharded parameter would be lost; otherwise "".
/// `writer`: the subject of the message.
std::string Unit::lost_write(const std::string& writer) const {
  for (const ParameterGroup& group : groups_) {
    if (const std::string name = group.lost_write(); !name.empty()) {
      return tessera::detail::concat(
          writer, " wrote to its parameter '", name,
          "' while the parameter was a gathered copy, so the write would be lost; write to "
          "slot->persistent() outside of forward");
    }
  }
  return "";
}

/// Returns an error message if the program has called unshard() and has then written to a
/// parameter: the write would be lost. Returns "" otherwise, and during forward and backward.
std::string Unit::write_by_hand() const {
  const bool computes = runs_forward() || phase_ == UnitPhase::kBackward;
  return computes || !installed() ? ""
                                  : lost_write("the program, after unshard of " + label() + ",");
}

/// Throws Error if the program has written to unsharded parameters. The check must precede all
/// gathers, because a gather can free the written memory.
void Unit::refuse_write_by_hand() const {
  const std::string lost = write_by_hand();
  TESSERA_CHECK(lost.empty(), lost);
}

void Unit::enter_as_root() {
  if (iteration_ == nullptr) {
    make_iteration();
  }
  if (is_root()) {
    check_all_in_units();
    for (const std::shared_ptr<Unit>& unit : iteration_->units()) {
      unit->refuse_write_by_hand();
    }
    follows_abandoned_ = iteration_->begin_forward();
    return;
  }
  iteration_->forget_failure();
  refuse_write_by_hand();
  if (!iteration_->is_under_way()) {
    // If an earlier call of this unit without the root has failed, the phase is still kForward.
    if (runs_forward() && modules_.size() == 1 && random_regions_.size() == 1) {
      reset_to_idle();
    }
    await_compute();
  } else if (!iteration_->runs()) {
    refuse_outdated();
  }
}

void Unit::await_compute() {
  const bool between = iteration_ == nullptr || !iteration_->is_under_way();
  // Outside of an iteration the program can have written the shards, so the cached parts
  // (Options::post_forward_mesh_size) are dropped. Within an iteration the cached parts stay valid.
  if (between) {
    each(&GatheredState::drop_piece);
  }
  if (between || !iteration_->runs()) {
    std::vector<ParameterGroup*> holding;
    for (ParameterGroup& group : groups()) {
      if (group.gathered().holds_copies()) {
        holding.push_back(&group);
      }
    }
    free_outdated(holding, comm_context());
  }
  // Later gathers wait for earlier work on the compute stream, which can write the shards.
  comm_context().streams().order(comm::Lane::kCompute, comm::Lane::kAllGather);
}

/// Throws Error if this rank has written to shards whose old values are still gathered. Not
/// collective, because a loss function can call the unit many times.
void Unit::refuse_outdated() {
  for (const ParameterGroup& group : groups()) {
    TESSERA_CHECK(
        !group.gathered().holds_copies() || group.gathered().is_current(), "forward of ", label(),
        " was called, but its parameters were changed while a backward still needs the gathered "
        "old values; run that backward first, or free the gathered parameters with fsdp::reshard");
  }
}

/// In training, checks that all trainable parameters of the called module are in units. Checks
/// again only after a change of a parameter slot or of requires_grad.
void Unit::check_all_in_units() {
  if (!c10::GradMode::is_enabled() || mesh_.ranks() == 1) {
    return;
  }
  const nn::ModuleBase* outermost = nn::detail::outermost_call();
  const nn::ModuleBase& module = outermost == nullptr ? *modules_.front() : *outermost;
  std::uint64_t slots = 0;
  mix_slots(slots, module);
  if (checked_slots_ != slots) {
    refuse_forgotten_parameters(module, mesh_, checked_slots_.has_value());
    checked_slots_ = slots;
  }
}

void Unit::abandon_iteration() {
  each(&GradientState::drop_unsharded);
  each(&GatheredState::reshard, comm_context());
  forget_calls();
}

/// A failed forward or backward can have left the unit in any state, so the state is reset.
void Unit::forget_calls() {
  to_run_.clear();
  ran_all_ = false;
  awaits_call_ = false;
  buckets_left_ = groups().size();
  buckets_backward_ = -1;
  if (phase_ != UnitPhase::kNew) {
    reset_to_idle();
  }
}

void Unit::begin_iteration() {
  forget_calls();
  prepare();
}

}  // namespace tessera::fsdp
