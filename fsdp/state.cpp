#include "state.h"

namespace tessera::fsdp {

// The tables of legal transitions, and Phase::enter, the only function that changes a phase.
// Because all of FSDP's control flow passes through Phase::enter, an unexpected order of calls is
// an error that names both phases, and not a wrong gradient.

namespace {

template <class P>
std::string successors_of(P phase) {
  std::string names;
  for (const Transition<P>& transition : legal_transitions<P>()) {
    if (transition.from == phase) {
      names += (names.empty() ? "" : ", ") + std::string(to_string(transition.to));
    }
  }
  return names;
}

}  // namespace

// docs/fsdp.md has the cause of each transition.

template <>
const std::vector<Transition<IterationPhase>>& legal_transitions() {
  using enum IterationPhase;
  static const std::vector<Transition<IterationPhase>> table{
      {kIdle, kForward},
      {kIdle, kAwaitingBackward},
      {kIdle, kBackward},
      {kForward, kForward},
      {kForward, kIdle},
      {kForward, kAwaitingBackward},
      {kForward, kBackward},
      {kAwaitingBackward, kForward},
      {kAwaitingBackward, kAwaitingBackward},
      {kAwaitingBackward, kBackward},
      {kBackward, kIdle},
      {kBackward, kAwaitingBackward},
  };
  return table;
}

template <>
const std::vector<Transition<UnitPhase>>& legal_transitions() {
  using enum UnitPhase;
  static const std::vector<Transition<UnitPhase>> table{
      {kNew, kIdle},
      {kIdle, kForward},
      {kIdle, kBackward},
      {kForward, kIdle},
      {kForward, kForwardRecorded},
      {kForward, kBackward},
      {kForwardRecorded, kIdle},
      {kForwardRecorded, kAwaitingBackward},
      {kForwardRecorded, kBackward},
      {kAwaitingBackward, kIdle},
      {kAwaitingBackward, kForward},
      {kAwaitingBackward, kForwardRecorded},
      {kAwaitingBackward, kBackward},
      {kBackward, kIdle},
  };
  return table;
}

template <>
const std::vector<Transition<GatherPhase>>& legal_transitions() {
  using enum GatherPhase;
  static const std::vector<Transition<GatherPhase>> table{
      {kSharded, kGathering}, {kSharded, kUnsharded}, {kGathering, kUnsharded},
      {kGathering, kSharded}, {kUnsharded, kSharded},
  };
  return table;
}

const char* to_string(IterationPhase phase) {
  static constexpr const char* kNames[] = {"kIdle", "kForward", "kAwaitingBackward", "kBackward"};
  return kNames[static_cast<std::size_t>(phase)];
}

const char* to_string(UnitPhase phase) {
  static constexpr const char* kNames[] = {
      "kNew", "kIdle", "kForward", "kForwardRecorded", "kAwaitingBackward", "kBackward"};
  return kNames[static_cast<std::size_t>(phase)];
}

const char* to_string(GatherPhase phase) {
  static constexpr const char* kNames[] = {"kSharded", "kGathering", "kUnsharded"};
  return kNames[static_cast<std::size_t>(phase)];
}

template <class P>
void Phase<P>::enter(P next, const std::string& whose) {
  // The tables have at most 14 rows, so a linear search is cheap compared with a collective.
  const bool legal =
      std::ranges::any_of(legal_transitions<P>(), [&](const Transition<P>& transition) {
        return transition.from == now_ && transition.to == next;
      });
  TESSERA_CHECK(legal, "fully_shard: ", whose, " cannot go from phase ", to_string(now_), " to ",
                to_string(next), ", only to ", successors_of(now_),
                "; call modules and backward in an order that docs/fsdp.md has");
  now_ = next;
}

// Phase::enter is defined in this file, next to the tables, and instantiated for the three phase
// types that exist.
template class Phase<IterationPhase>;
template class Phase<UnitPhase>;
template class Phase<GatherPhase>;

// GatherOrder stores positions instead of a successor for each unit, because a unit may run more
// than once in a forward.

void GatherOrder::begin() {
  running_.clear();
  gathered_.clear();
  follows_ = true;
}

void GatherOrder::gathered(const std::shared_ptr<Unit>& unit) {
  gathered_.push_back(unit);
}

bool GatherOrder::used(const std::shared_ptr<Unit>& unit) {
  if (std::ranges::none_of(gathered_, [&](const auto& each) { return each.lock() == unit; })) {
    return false;
  }
  follows_ = next() == unit;
  running_.push_back(unit);
  return true;
}

std::shared_ptr<Unit> GatherOrder::next() const {
  const bool known = follows_ && running_.size() < last_.size();
  return known ? last_[running_.size()].lock() : nullptr;
}

/// The order of the previous forward is kept if this forward gathered nothing: units that stay
/// unsharded between micro-batches are gathered only in the first micro-batch.
void GatherOrder::end() {
  if (!running_.empty()) {
    last_ = std::exchange(running_, {});
  }
  follows_ = false;
}

}  // namespace tessera::fsdp
