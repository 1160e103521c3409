// The tables of legal transitions and the one function that changes a phase. All of FSDP's control
// flow goes through Phase::enter, so an unexpected order of calls is an error that names both
// phases, and not a wrong gradient.

#include "state/phases.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::fsdp {
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

// The causes are those of docs/fsdp_states.md; fsdp_test compares them.

template <>
const std::vector<Transition<IterationPhase>>& legal_transitions() {
  using enum IterationPhase;
  static const std::vector<Transition<IterationPhase>> table{
      {kBetweenSteps, kForward, "the root's forward begins a step"},
      {kBetweenSteps, kAwaitingBackward,
       "the root's forward ends, and a backward that it ran had ended the iteration"},
      {kBetweenSteps, kBackward,
       "backward comes to a unit that was called by itself, or again (create_graph, retain_graph)"},
      {kBetweenMicroBatches, kForward, "the root's forward begins the next micro-batch"},
      {kBetweenMicroBatches, kAwaitingBackward,
       "the root's forward ends, and a backward that it ran had ended the micro-batch"},
      {kBetweenMicroBatches, kBackward,
       "backward comes to an earlier micro-batch (a pipeline), or to a unit called by itself"},
      {kForward, kForward, "the root's forward begins after one that failed, or within itself"},
      {kForward, kBetweenSteps, "the root's forward ends, no result needs a gradient"},
      {kForward, kBetweenMicroBatches, "the same, and the settings say that the step continues"},
      {kForward, kAwaitingBackward, "the root's forward ends, a result needs a gradient"},
      {kForward, kBackward, "the root's forward runs a backward"},
      {kAwaitingBackward, kForward,
       "the root's forward begins: no backward came, and the iteration is abandoned"},
      {kAwaitingBackward, kAwaitingBackward,
       "a method of the root ends that called the root's forward"},
      {kAwaitingBackward, kBackward, "backward comes to the first unit"},
      {kBackward, kBetweenSteps, "backward ends, and with it the step"},
      {kBackward, kBetweenMicroBatches,
       "backward ends a micro-batch, or with ranks that disagree, or had failed when the root's "
       "next forward begins"},
      {kBackward, kAwaitingBackward,
       "the root's forward ends, and a backward that it ran had failed"},
  };
  return table;
}

template <>
const std::vector<Transition<UnitPhase>>& legal_transitions() {
  using enum UnitPhase;
  static const std::vector<Transition<UnitPhase>> table{
      {kNew, kIdle, "its shards are laid out, when the root's forward begins or it is gathered"},
      {kIdle, kForward, "the first of its modules is called"},
      {kIdle, kBackward,
       "backward comes again: the unit ran more than once, or a graph is kept (retain_graph) or "
       "made (create_graph)"},
      {kForward, kIdle,
       "its modules have run and no result needs a gradient, or its forward failed and the root's "
       "begins"},
      {kForward, kForwardRecorded, "a result needs a gradient"},
      {kForward, kBackward, "a backward runs within its forward, or after that failed"},
      {kForwardRecorded, kIdle, "a later one of its modules failed, and the root's forward begins"},
      {kForwardRecorded, kAwaitingBackward, "its modules have run"},
      {kForwardRecorded, kBackward, "a backward runs between its modules"},
      {kAwaitingBackward, kIdle, "the root's forward begins: the iteration was abandoned"},
      {kAwaitingBackward, kForward, "it is called again"},
      {kAwaitingBackward, kForwardRecorded, "a method ends that called its forward"},
      {kAwaitingBackward, kBackward, "a result's gradient comes, or its forward is recomputed"},
      {kBackward, kIdle,
       "its inputs' gradients have come, backward ends, or backward failed and the root's forward "
       "begins"},
  };
  return table;
}

template <>
const std::vector<Transition<GatherPhase>>& legal_transitions() {
  using enum GatherPhase;
  static const std::vector<Transition<GatherPhase>> table{
      {kSharded, kGathering, "the all-gather starts"},
      {kSharded, kUnsharded, "one rank shards: nothing is gathered"},
      {kGathering, kUnsharded, "the all-gather has been waited for"},
      {kGathering, kSharded, "the all-gather failed, or its unit was freed before it was used"},
      {kUnsharded, kSharded, "the unit is freed"},
  };
  return table;
}

const char* to_string(IterationPhase phase) {
  static constexpr const char* kNames[] = {"kBetweenSteps", "kBetweenMicroBatches", "kForward",
                                           "kAwaitingBackward", "kBackward"};
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
  // Tables of at most 17 rows: a search costs nothing beside the collective that a change leads to.
  const bool legal =
      std::ranges::any_of(legal_transitions<P>(), [&](const Transition<P>& transition) {
        return transition.from == now_ && transition.to == next;
      });
  TESSERA_CHECK(legal, "fully_shard: ", whose, " cannot go from phase ", to_string(now_), " to ",
                to_string(next), ", only to ", successors_of(now_),
                "; call modules and backward in an order that docs/fsdp_states.md has");
  if (PhaseRecorder* const* recorder = PhaseRecorder::Scope::active()) {
    (*recorder)->changes<P>().push_back({whose, to_string(now_), to_string(next)});
  }
  now_ = next;
}

// The template is defined here, beside the tables, for the only three types that have one.
template class Phase<IterationPhase>;
template class Phase<UnitPhase>;
template class Phase<GatherPhase>;

}  // namespace tessera::fsdp
