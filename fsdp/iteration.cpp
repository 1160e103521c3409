// The iteration of a root and the units below it: what happens once a forward or a backward,
// whichever units it runs. Its phase decides what a call means; the order of the steps in
// begin_forward() and end_backward() is the contract between the units, the pool of buffers and the
// ranks' agreements.

#include "unit.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "param_group.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/internals/detail/backward.h"

namespace tessera::fsdp {

IterationState::IterationState(const std::vector<std::shared_ptr<Unit>>& units)
    : units_(units.begin(), units.end()) {}

/// A part of the model may have been dropped.
std::vector<std::shared_ptr<Unit>> IterationState::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (const std::weak_ptr<Unit>& unit : units_) {
    if (std::shared_ptr<Unit> locked = unit.lock()) {
      alive.push_back(std::move(locked));
    }
  }
  return alive;
}

/// All units of an iteration use the root's (Unit::make_iteration), and the root is first.
CommContext& IterationState::comm_context() const {
  return units().front()->comm_context();
}

bool IterationState::is_open() const {
  return phase() != IterationPhase::kIdle;
}

/// A single unit set to false leaves the reductions of all units under way.
bool IterationState::is_last_backward() const {
  return std::ranges::all_of(units(),
                             [](const auto& unit) { return unit->settings().last_backward; });
}

void IterationState::enter(IterationPhase next) {
  const std::shared_ptr<Unit> root = units_.front().lock();
  phase_.enter(next, "the iteration of " + (root ? root->label() : "a root that is gone"));
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

// Forward.

/// Another model's backward may be running on this thread, so this iteration's own token is
/// checked; autograd may hold that slightly longer than it runs.
bool IterationState::backward_failed() const {
  return phase() == IterationPhase::kBackward &&
         (backward_.expired() || tessera::detail::backward_id() < 0);
}

bool IterationState::begin_forward() {
  // Checked before the phase changes. True also after a failed backward, whose gathered memory and
  // gradients are dropped the same way.
  const bool abandons = is_open();
  if (backward_failed()) {
    forget_reductions();
    enter(IterationPhase::kIdle);
  }
  TESSERA_CHECK(phase() != IterationPhase::kBackward, "forward of ", units().front()->label(),
                " was called within its own backward, from a hook or an autograd function for "
                "example; call it before or after backward, or let nn::checkpoint run it again");
  enter(IterationPhase::kForward);
  // Removes graphs that were dropped. Those of earlier micro-batches may still come (a pipeline).
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

/// Shards may have been written since: the optimizer's update comes before what is gathered.
void IterationState::await_update() {
  comm::Streams& streams = comm_context().streams();
  const std::vector<std::shared_ptr<Unit>> all = units();
  const auto event = std::exchange(all.front()->settings().post_optim_event, std::nullopt);
  const auto in_compute = std::ranges::count_if(
      all, [](const auto& unit) { return unit->settings().unshard_async_op; });
  // Gathers in the compute lane follow its work anyway; for them only an event from elsewhere
  // counts.
  if (in_compute < std::ssize(all)) {
    streams.wait(comm::Lane::kAllGather, event ? *event : streams.record(comm::Lane::kCompute));
  }
  if (in_compute > 0 && event) {
    streams.wait(comm::Lane::kCompute, *event);
  }
}

/// Keeps what is still gathered as long as no rank has written to its shards.
void IterationState::settle_gathered() {
  std::vector<ParameterGroup*> keeping;
  for_each_group([&](ParameterGroup& group) {
    GatheredState& gathered = group.gathered();
    gathered.drop_piece();  // of a unit that the last backward did not come to
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
  if (ahead != nullptr && ahead->parameters().any(&GatheredState::is_gathering)) {
    return nullptr;
  }
  std::shared_ptr<Unit> next = gather_order_.next();
  ahead_ = next;
  return next;
}

/// This forward uses other units than the last one.
void IterationState::free_unused() const {
  if (const std::shared_ptr<Unit> ahead = ahead_.lock()) {
    ahead->parameters().each(&GatheredState::reshard_unused, comm_context());
  }
}

/// By tokens: a graph that was dropped has no backward, and must not be prefetched for.
void IterationState::ran_forward(Unit& unit, const std::shared_ptr<void>& token) {
  forward_order_.push_back({&unit, token});
}

void IterationState::end_forward(bool backward_comes) {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->end_partial_forward();
  }
  free_unused();
  // Before the phase changes: where ranks have gathered different units, all of them throw here,
  // and none hangs in backward.
  agree_on_gathers();
  gather_order_.end();
  if (phase() == IterationPhase::kBackward) {  // one that the forward ran, and that failed
    forget_reductions();
  }
  if (backward_comes) {
    enter(IterationPhase::kAwaitingBackward);
  } else {
    end_iteration();
  }
}

/// Not over replicas: nothing has been called there, and their forwards may differ.
void IterationState::agree_on_gathers() {
  std::vector<comm::Communicator*> sharding;
  for_each_group([&](ParameterGroup& group) { group.add_sharding_groups(sharding); });
  try {
    agree_on_calls(sharding, {}, units().front()->settings());
  } catch (...) {
    for_each_group([&](ParameterGroup& group) { group.gathered().discard(comm_context()); });
    throw;
  }
}

void IterationState::end_iteration() {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->reshard();
  }
  // No reduction will use the buffers.
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
    unit->parameters().forget_reductions();
  }
}

// Backward.

void IterationState::enter_backward() {
  if (phase() != IterationPhase::kBackward) {
    enter(IterationPhase::kBackward);
    // Autograd drops its callbacks when a backward throws: an expired token shows the failure.
    const auto token = std::make_shared<char>();
    backward_ = token;
    // Kept alive: backward may outlive the model.
    tessera::detail::call_at_end_of_backward(
        [self = shared_from_this(), token] { self->end_backward(); });
    // All ranks come here before they gather anything else; to a unit that may be unused, some come
    // alone. It was gathered in forward, but another forward or backward may have freed it since.
    for (const std::shared_ptr<Unit>& unit : units()) {
      if (unit->settings().unshard_in_backward) {
        unit->gather_on_all_ranks();
      }
    }
  }
}

std::shared_ptr<Unit> IterationState::ran_before(const Unit& unit) {
  const auto ran = std::find_if(forward_order_.rbegin(), forward_order_.rend(),
                                [&](const Ran& entry) { return entry.unit == &unit; });
  if (ran == forward_order_.rend()) {
    return nullptr;
  }
  // Backward runs in reverse order of forward: units that ran later are done.
  forward_order_.erase(ran.base() - 1, forward_order_.end());
  // The token's holder also holds the unit.
  // An expired entry before it: its graph is gone, and it would be gathered for nothing.
  const bool known = !forward_order_.empty() && !forward_order_.back().token.expired();
  return known ? forward_order_.back().unit->shared_from_this() : nullptr;
}

void IterationState::end_backward() {
  const std::vector<std::shared_ptr<Unit>> all = units();
  // Last first, as backward itself goes.
  std::for_each(all.rbegin(), all.rend(), [](const auto& unit) { unit->end_backward(); });
  // With more backwards to come (set_is_last_backward) nothing is settled yet.
  const bool last = is_last_backward();
  if (last) {
    comm_context().finish_reductions();  // replicas are reduced over here
  }
  agree_on_gradients();
  // Otherwise the last unit's reduction stays under way, beside the next micro-batch.
  if (last) {
    comm_context().settle();
    agree_on_use();
  } else {
    for_each_group([](ParameterGroup& group) { group.gradients().mark_expected(); });
  }
  forward_order_.clear();
  close();
  if (last && tessera::detail::debug_checks()) {
    for (const std::shared_ptr<Unit>& unit : all) {
      unit->parameters().compare_copies();
    }
  }
}

/// After a failure the gradients are dropped: wrong sums have been added to right ones.
void IterationState::agree_on_gradients() {
  std::vector<comm::Communicator*> sharding;
  std::vector<comm::Communicator*> replicating;
  for_each_group([&](ParameterGroup& group) {
    group.add_sharding_groups(sharding);
    group.add_replica_groups(replicating);
  });
  try {
    agree_on_calls(sharding, replicating, units().front()->settings());
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

/// A parameter that no rank used has no gradient, as on one rank.
void IterationState::agree_on_use() {
  UseAgreement agreement;
  for_each_group([&](ParameterGroup& group) { agreement.add(group); });
  agreement.settle();
}

}  // namespace tessera::fsdp
