#include "context.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "backward_hooks.h"
#include "call_agreement.h"
#include "piece_agreement.h"
#include "unit.h"
#include "use_agreement.h"

namespace tessera::fsdp {

Context::Context(const std::vector<std::shared_ptr<Unit>>& units)
    : units_(units.begin(), units.end()) {}

std::vector<std::shared_ptr<Unit>> Context::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (const std::weak_ptr<Unit>& unit : units_) {
    if (std::shared_ptr<Unit> locked = unit.lock()) {
      alive.push_back(std::move(locked));
    }
  }
  return alive;
}

Communication& Context::communication() const {
  return units().front()->communication();
}

bool Context::is_last_backward() const {
  return std::ranges::all_of(units(),
                             [](const auto& unit) { return unit->settings().last_backward; });
}

void Context::begin_forward() {
  if (std::exchange(in_backward_, false)) {  // which failed
    for (const std::shared_ptr<Unit>& unit : units()) {
      unit->forget_reductions();
    }
  }
  std::erase_if(forward_order_, [](const Ran& ran) { return ran.token.expired(); });
  await_update();
  if (std::exchange(iteration_open_, true)) {
    std::ranges::for_each(units(), [](const auto& unit) { unit->abandon_iteration(); });
  }
  agree_on_pieces();
  std::ranges::for_each(units(), [](const auto& unit) { unit->begin_iteration(); });
}

/// They are of use while no rank has written to its shards, or lost one.
void Context::agree_on_pieces() {
  if (!std::exchange(step_open_, true)) {
    for_each_group([](ParameterGroup& group) { group.drop_piece(); });
    return;
  }
  std::vector<ParameterGroup*> groups;
  for_each_group([&](ParameterGroup& group) {
    if (group.keeps_pieces()) {
      groups.push_back(&group);
    }
  });
  drop_invalid_pieces(groups);
}

/// Shards may have been written since: the optimizer's update comes before what is gathered.
void Context::await_update() {
  comm::Streams& streams = communication().streams();
  const std::vector<std::shared_ptr<Unit>> all = units();
  const auto event = std::exchange(all.front()->settings().post_optim_event, std::nullopt);
  const auto in_compute = std::ranges::count_if(
      all, [](const auto& unit) { return unit->settings().unshard_async_op; });
  if (in_compute < std::ssize(all)) {
    streams.wait(comm::Lane::kAllGather, event ? *event : streams.record(comm::Lane::kCompute));
  }
  if (in_compute > 0 && event) {
    streams.wait(comm::Lane::kCompute, *event);
  }
}

void Context::end_forward() {
  for (const std::shared_ptr<Unit>& unit : units()) {
    unit->end_partial_forward();
  }
  agree_on_gathers();
}

template <class Act>
void Context::for_each_group(Act&& act) const {
  for (const std::shared_ptr<Unit>& unit : units()) {
    for (ParameterGroup& group : unit->groups()) {
      act(group);
    }
  }
}

/// Not over replicas: nothing has been called there, and their forwards may go apart.
void Context::agree_on_gathers() {
  std::vector<comm::Communicator*> sharding;
  for_each_group([&](ParameterGroup& group) { group.add_sharding_groups(sharding); });
  try {
    agree_on_calls(sharding, {});
  } catch (...) {
    for_each_group([&](ParameterGroup& group) { group.discard(communication()); });
    throw;
  }
}

/// On failure no gradient is left: wrong sums have been added to right ones.
void Context::agree_on_gradients() {
  std::vector<comm::Communicator*> sharding;
  std::vector<comm::Communicator*> replicating;
  for_each_group([&](ParameterGroup& group) {
    group.add_sharding_groups(sharding);
    group.add_replica_groups(replicating);
  });
  try {
    agree_on_calls(sharding, replicating);
  } catch (...) {
    std::ranges::for_each(units(), [](const auto& unit) { unit->forget_reductions(); });
    for_each_group([&](ParameterGroup& group) {
      group.drop_all_gradients();
      group.discard(communication());
    });
    close_iteration();
    throw;
  }
}

/// A parameter that no rank used has no gradient, as on one rank.
void Context::agree_on_use() {
  UseAgreement agreement;
  for_each_group([&](ParameterGroup& group) { group.add_accumulated(agreement); });
  agreement.settle();
}

void Context::close_iteration() {
  forward_order_.clear();
  in_backward_ = false;
  iteration_open_ = false;
}

void Context::end_iteration() {
  std::ranges::for_each(units(), [](const auto& unit) { unit->reshard_within_step(); });
  communication().pool().clear();
  end_micro_batch();
  iteration_open_ = false;
}

void Context::end_micro_batch() {
  std::ranges::for_each(units(), [](const auto& unit) { unit->end_micro_batch(); });
  step_open_ = std::ranges::any_of(units(), &Unit::step_goes_on);
}

void Context::ran_forward(Unit& unit, const std::shared_ptr<void>& token) {
  forward_order_.push_back({&unit, token});
}

void Context::enter_backward() {
  if (!std::exchange(in_backward_, true)) {
    call_at_end_of_backward([self = shared_from_this()] { self->end_backward(); });
  }
}

std::shared_ptr<Unit> Context::ran_before(const Unit& unit) {
  const auto ran = std::find_if(forward_order_.rbegin(), forward_order_.rend(),
                                [&](const Ran& entry) { return entry.unit == &unit; });
  if (ran == forward_order_.rend()) {
    return nullptr;
  }
  forward_order_.erase(ran.base() - 1, forward_order_.end());
  // The token's holder also holds the unit.
  const bool known = !forward_order_.empty() && !forward_order_.back().token.expired();
  return known ? forward_order_.back().unit->shared_from_this() : nullptr;
}

void Context::end_backward() {
  const std::vector<std::shared_ptr<Unit>> all = units();
  // Last first, as backward itself goes.
  std::for_each(all.rbegin(), all.rend(), [](const auto& unit) { unit->end_backward(); });
  const bool last = is_last_backward();
  if (last) {
    communication().finish_reductions();  // replicas are reduced over here
  }
  agree_on_gradients();
  if (last) {
    communication().settle();
    agree_on_use();
  }
  end_micro_batch();
  close_iteration();
}

}  // namespace tessera::fsdp
