// The iteration of a root and the units below it: what happens once for each forward or backward,
// whichever units run. The iteration's phase decides what a call means. The order of the steps in
// begin_forward() and end_backward() is a contract between the units, the buffer pool and the
// agreements of the ranks.

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

/// The units that still exist; the program may have dropped a part of the model.
std::vector<std::shared_ptr<Unit>> IterationState::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (const std::weak_ptr<Unit>& unit : units_) {
    if (std::shared_ptr<Unit> locked = unit.lock()) {
      alive.push_back(std::move(locked));
    }
  }
  return alive;
}

/// All units of an iteration use the root's context (Unit::make_iteration). The root is the first
/// unit.
CommContext& IterationState::comm_context() const {
  return units().front()->comm_context();
}

bool IterationState::is_open() const {
  return phase() != IterationPhase::kIdle;
}

/// If set_is_last_backward(false) was called for a single unit, the reductions of all units stay in
/// progress.
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

// The steps of an iteration around forward.

/// Checks this iteration's own token, because another model's backward may be running on this
/// thread. Autograd may hold the token slightly longer than backward runs, so the id of the running
/// backward is checked as well.
bool IterationState::backward_failed() const {
  return phase() == IterationPhase::kBackward &&
         (backward_.expired() || tessera::detail::backward_id() < 0);
}

bool IterationState::begin_forward() {
  // `abandons` is read before the phase changes. It is also true after a failed backward, whose
  // gathered memory and gradients are dropped in the same way.
  const bool abandons = is_open();
  if (backward_failed()) {
    forget_reductions();
    enter(IterationPhase::kIdle);
  }
  TESSERA_CHECK(phase() != IterationPhase::kBackward, "forward of ", units().front()->label(),
                " was called within its own backward, from a hook or an autograd function for "
                "example; call it before or after backward, or let nn::checkpoint run it again");
  enter(IterationPhase::kForward);
  // Removes forwards whose graphs were dropped. Graphs of earlier micro-batches may still get their
  // backward (in a pipeline).
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

/// Orders the gathers of this forward after the optimizer's update, which may have written the
/// shards.
void IterationState::await_update() {
  comm::Streams& streams = comm_context().streams();
  const std::vector<std::shared_ptr<Unit>> all = units();
  const auto event = std::exchange(all.front()->settings().post_optim_event, std::nullopt);
  const auto in_compute = std::ranges::count_if(
      all, [](const auto& unit) { return unit->settings().unshard_async_op; });
  // Gathers in the compute lane follow its work anyway; only units that gather in the all-gather
  // lane need the wait.
  if (in_compute < std::ssize(all)) {
    streams.wait(comm::Lane::kAllGather, event ? *event : streams.record(comm::Lane::kCompute));
  }
  if (in_compute > 0 && event) {
    streams.wait(comm::Lane::kCompute, *event);
  }
}

/// Keeps parameter groups gathered if no rank has written to their shards.
void IterationState::settle_gathered() {
  std::vector<ParameterGroup*> keeping;
  for_each_group([&](ParameterGroup& group) {
    GatheredState& gathered = group.gathered();
    gathered.drop_piece();  // of a unit that the last backward skipped
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

/// Frees a prefetched unit that this forward, unlike the last one, does not use.
void IterationState::free_unused() const {
  if (const std::shared_ptr<Unit> ahead = ahead_.lock()) {
    ahead->parameters().each(&GatheredState::reshard_unused, comm_context());
  }
}

/// The entry refers to the graph by a token. If the graph is dropped, the token expires and the
/// unit is not prefetched for its backward.
void IterationState::ran_forward(Unit& unit, const std::shared_ptr<void>& token) {
  forward_order_.push_back({&unit, token});
}

void IterationState::end_forward(bool backward_comes) {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->end_partial_forward();
  }
  free_unused();
  // The ranks agree before the phase changes. If they have gathered different units, all of them
  // throw here, and none waits forever in backward.
  agree_on_gathers();
  gather_order_.end();
  if (phase() == IterationPhase::kBackward) {  // a backward within this forward has failed
    forget_reductions();
  }
  if (backward_comes) {
    enter(IterationPhase::kAwaitingBackward);
  } else {
    end_iteration();
  }
}

/// Replicas are excluded: forward calls no collectives over them, and they may run different
/// forwards.
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
  // No backward follows, so no reduction will use the buffers.
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

// The steps of an iteration around backward.

void IterationState::enter_backward() {
  if (phase() != IterationPhase::kBackward) {
    enter(IterationPhase::kBackward);
    // Autograd drops its callbacks when a backward throws, so an expired token means that backward
    // has failed.
    const auto token = std::make_shared<char>();
    backward_ = token;
    // The callback keeps this iteration alive, because backward may outlive the model.
    tessera::detail::call_at_end_of_backward(
        [self = shared_from_this(), token] { self->end_backward(); });
    // All ranks enter backward before they gather anything else, but only some ranks may come to a
    // unit that may be unused. So such units are gathered here. They were gathered in forward, but
    // another forward or backward may have freed them.
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
  // Backward runs in reverse order of forward, so the units that ran later are finished.
  forward_order_.erase(ran.base() - 1, forward_order_.end());
  // An expired token means that the graph before this one was dropped, so gathering its unit would
  // be useless. A token that has not expired also keeps its unit alive.
  const bool known = !forward_order_.empty() && !forward_order_.back().token.expired();
  return known ? forward_order_.back().unit->shared_from_this() : nullptr;
}

void IterationState::end_backward() {
  const std::vector<std::shared_ptr<Unit>> all = units();
  // Units end their backward in reverse order, as backward itself runs.
  std::for_each(all.rbegin(), all.rend(), [](const auto& unit) { unit->end_backward(); });
  // If more backwards follow (set_is_last_backward), nothing is settled yet.
  const bool last = is_last_backward();
  if (last) {
    comm_context().finish_reductions();  // includes the all-reduce over replicas
  }
  agree_on_gradients();
  // If more backwards follow, the last unit's reduction stays in progress and overlaps the next
  // micro-batch.
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

/// After a failure the gradients are dropped, because wrong sums may have been added to right ones.
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

/// A parameter that no rank used gets no gradient, as in training on one rank.
void IterationState::agree_on_use() {
  UseAgreement agreement;
  for_each_group([&](ParameterGroup& group) { agreement.add(group); });
  agreement.settle();
}

}  // namespace tessera::fsdp
