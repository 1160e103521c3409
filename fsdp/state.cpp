#include "state.h"

namespace tessera::fsdp {

// The tables of legal phase transitions, and Phase::enter(), the only function that changes a
// phase. A wrong order of calls causes an error instead of a wrong gradient.

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

template <>
const std::vector<Transition<IterationPhase>>& legal_transitions() {
  using enum IterationPhase;
  static const std::vector<Transition<IterationPhase>> table{
      // The iteration enters kForward when the root's forward begins.
      {kIdle, kForward},
      // The iteration enters kAwaitingBackward when the root's forward ends after a backward within
      // this forward.
      {kIdle, kAwaitingBackward},
      // The iteration enters kBackward when backward reaches a unit that was called without the
      // root, an earlier micro-batch, or a reused graph (create_graph, retain_graph).
      {kIdle, kBackward},
      // The iteration enters kForward again when the root's forward begins and the last forward
      // failed or still runs.
      {kForward, kForward},
      // The iteration enters kIdle when the root's forward ends without a result that needs a
      // gradient, or a unit is called without the root after a failed forward of the root.
      {kForward, kIdle},
      {kForward, kAwaitingBackward},
      // The iteration enters kBackward when a backward runs within the root's forward.
      {kForward, kBackward},
      // The iteration enters kForward when the root's forward begins and the previous forward had
      // no backward.
      {kAwaitingBackward, kForward},
      // The iteration stays in kAwaitingBackward when a registered method of the root ends after a
      // call of the root's forward.
      {kAwaitingBackward, kAwaitingBackward},
      // The iteration enters kBackward when backward reaches the first unit.
      {kAwaitingBackward, kBackward},
      // The iteration enters kIdle when backward ends (also if the ranks disagree), or when the
      // next forward of the root or of a unit begins after a failed backward.
      {kBackward, kIdle},
      // The iteration enters kAwaitingBackward when the root's forward ends and a backward within
      // this forward has failed.
      {kBackward, kAwaitingBackward},
  };
  return table;
}

template <>
const std::vector<Transition<UnitPhase>>& legal_transitions() {
  using enum UnitPhase;
  static const std::vector<Transition<UnitPhase>> table{
      // The unit enters kIdle when the unit's shards are laid out: when the root's forward begins,
      // or when the unit is gathered.
      {kNew, kIdle},
      // The unit enters kForward when the first of its modules is called.
      {kIdle, kForward},
      // The unit enters kBackward when backward reaches the unit a second time: repeated calls of
      // the unit, retain_graph or create_graph.
      {kIdle, kBackward},
      // The unit enters kIdle when its modules have run and no result needs a gradient, or when the
      // root's forward begins after the unit's forward has failed.
      {kForward, kIdle},
      // The unit enters kForwardRecorded when autograd has recorded a result that needs a gradient.
      {kForward, kForwardRecorded},
      // The unit enters kBackward when a backward runs within the unit's forward or after the
      // forward failed.
      {kForward, kBackward},
      // The unit enters kIdle when the root's forward begins and the previous forward failed after
      // the unit's first recorded result.
      {kForwardRecorded, kIdle},
      // The unit enters kAwaitingBackward when all of its modules have run.
      {kForwardRecorded, kAwaitingBackward},
      // The unit enters kBackward when a backward runs between two of its modules.
      {kForwardRecorded, kBackward},
      // The unit enters kIdle when the root's forward begins and the previous forward had no
      // backward.
      {kAwaitingBackward, kIdle},
      // The unit enters kForward when it runs a second forward before backward.
      {kAwaitingBackward, kForward},
      // The unit enters kForwardRecorded when a registered method of the unit ends after a call of
      // the unit's forward.
      {kAwaitingBackward, kForwardRecorded},
      // The unit enters kBackward when backward reaches a result of the unit, or the unit's forward
      // is recomputed.
      {kAwaitingBackward, kBackward},
      // The unit enters kIdle when its inputs' gradients are computed, when backward ends, or when
      // the root's forward begins after a failed backward.
      {kBackward, kIdle},
  };
  return table;
}

template <>
const std::vector<Transition<GatherPhase>>& legal_transitions() {
  using enum GatherPhase;
  static const std::vector<Transition<GatherPhase>> table{
      {kSharded, kGathering},
      // The parameter group enters kUnsharded when its mesh has one rank, so nothing is gathered.
      {kSharded, kUnsharded},
      // The parameter group enters kUnsharded when the wait for the all-gather has ended.
      {kGathering, kUnsharded},
      // The parameter group enters kSharded when the all-gather failed, or its result is freed
      // before any use.
      {kGathering, kSharded},
      {kUnsharded, kSharded},
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
                "; call modules and backward in the order that docs/fsdp.md describes");
  now_ = next;
}

template class Phase<IterationPhase>;
template class Phase<UnitPhase>;
template class Phase<GatherPhase>;

// A unit can run several times in a forward, so GatherOrder stores the whole sequence of units, not
// one successor for each unit.

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

/// Units can stay unsharded over several micro-batches. So a forward that gathered no unit does not
/// change the order.
void GatherOrder::end() {
  if (!running_.empty()) {
    last_ = std::exchange(running_, {});
  }
  follows_ = false;
}

}  // namespace tessera::fsdp
