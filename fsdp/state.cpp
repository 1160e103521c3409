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

template <>
const std::vector<Transition<IterationPhase>>& legal_transitions() {
  using enum IterationPhase;
  static const std::vector<Transition<IterationPhase>> table{
      // the root's forward begins
      {kIdle, kForward},
      // the root's forward ends, and a backward that it ran had ended the iteration
      {kIdle, kAwaitingBackward},
      // backward comes to a unit that was called by itself, to an earlier micro-batch (a pipeline),
      // or again (create_graph, retain_graph)
      {kIdle, kBackward},
      // the root's forward begins after one that failed, or within itself
      {kForward, kForward},
      // the root's forward ends, no result needs a gradient
      {kForward, kIdle},
      // the root's forward ends, a result needs a gradient
      {kForward, kAwaitingBackward},
      // the root's forward runs a backward
      {kForward, kBackward},
      // the root's forward begins: no backward came, and the iteration is abandoned
      {kAwaitingBackward, kForward},
      // a method of the root ends that called the root's forward
      {kAwaitingBackward, kAwaitingBackward},
      // backward comes to the first unit
      {kAwaitingBackward, kBackward},
      // backward ends, or with ranks that disagree, or had failed when the root's next forward
      // begins
      {kBackward, kIdle},
      // the root's forward ends, and a backward that it ran had failed
      {kBackward, kAwaitingBackward},
  };
  return table;
}

template <>
const std::vector<Transition<UnitPhase>>& legal_transitions() {
  using enum UnitPhase;
  static const std::vector<Transition<UnitPhase>> table{
      // its shards are laid out, when the root's forward begins or it is gathered
      {kNew, kIdle},
      // the first of its modules is called
      {kIdle, kForward},
      // backward comes again: the unit ran more than once, or a graph is kept (retain_graph) or
      // made (create_graph)
      {kIdle, kBackward},
      // its modules have run and no result needs a gradient, or its forward failed and the root's
      // begins
      {kForward, kIdle},
      // a result needs a gradient
      {kForward, kForwardRecorded},
      // a backward runs within its forward, or after that failed
      {kForward, kBackward},
      // a later one of its modules failed, and the root's forward begins
      {kForwardRecorded, kIdle},
      // its modules have run
      {kForwardRecorded, kAwaitingBackward},
      // a backward runs between its modules
      {kForwardRecorded, kBackward},
      // the root's forward begins: the iteration was abandoned
      {kAwaitingBackward, kIdle},
      // it is called again
      {kAwaitingBackward, kForward},
      // a method ends that called its forward
      {kAwaitingBackward, kForwardRecorded},
      // a result's gradient comes, or its forward is recomputed
      {kAwaitingBackward, kBackward},
      // its inputs' gradients have come, backward ends, or backward failed and the root's forward
      // begins
      {kBackward, kIdle},
  };
  return table;
}

template <>
const std::vector<Transition<GatherPhase>>& legal_transitions() {
  using enum GatherPhase;
  static const std::vector<Transition<GatherPhase>> table{
      // the all-gather starts
      {kSharded, kGathering},
      // one rank shards: nothing is gathered
      {kSharded, kUnsharded},
      // the all-gather has been waited for
      {kGathering, kUnsharded},
      // the all-gather failed, or its unit was freed before it was used
      {kGathering, kSharded},
      // the unit is freed
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
