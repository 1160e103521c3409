#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

// The phases of an iteration, a unit and the gather of a group. Which phase may follow which, and
// why, is in the tables of phases.cpp, drawn in docs/fsdp_states.md. Recoveries (a forward or
// backward that failed, an iteration that never came to its backward) are transitions like any
// other.

/// Phases of a root and all units below it.
enum class IterationPhase : std::uint8_t {
  kBetweenSteps,         ///< nothing is left of an earlier iteration
  kBetweenMicroBatches,  ///< the step continues: pieces of gathered memory may be kept for it
  kForward,              ///< the root's forward runs
  kAwaitingBackward,     ///< it has ended, and a result of it needs a gradient
  kBackward,             ///< backward has come to a unit and has not ended
};

/// Phases of one unit.
enum class UnitPhase : std::uint8_t {
  kNew,               ///< its shards are not laid out yet
  kIdle,              ///< neither forward nor backward is in it
  kForward,           ///< its modules run; no result so far needs a gradient
  kForwardRecorded,   ///< its modules run; a result needs a gradient, so backward will come
  kAwaitingBackward,  ///< its modules have run, and backward will come
  kBackward,          ///< backward has come to it and has not passed it
};

/// Phases of the parameters of one group.
enum class GatherPhase : std::uint8_t {
  kSharded,    ///< the slots hold the shards, and nothing else takes memory
  kGathering,  ///< an all-gather is under way, or done and not waited for
  kUnsharded,  ///< the unsharded tensors are filled, and in the slots while the unit computes
};

/// The name of the enumerator: "kForward".
const char* to_string(IterationPhase phase);
const char* to_string(UnitPhase phase);
const char* to_string(GatherPhase phase);

/// A phase, one that may follow it, and what leads from the one to the other.
template <class P>
struct Transition {
  P from;
  P to;
  const char* cause;
};

/// All of them.
template <class P>
const std::vector<Transition<P>>& legal_transitions();
template <>
const std::vector<Transition<IterationPhase>>& legal_transitions();
template <>
const std::vector<Transition<UnitPhase>>& legal_transitions();
template <>
const std::vector<Transition<GatherPhase>>& legal_transitions();

/// The phase that something is in. It changes by enter() alone. For one thread at a time.
template <class P>
class Phase {
 public:
  explicit Phase(P initial) : now_(initial) {}

  P now() const { return now_; }
  friend bool operator==(const Phase& phase, P value) { return phase.now_ == value; }
  /// Throws Error, naming both phases and `whose` they are ("unit 'a'"), and changes nothing,
  /// unless the table has the transition.
  void enter(P next, const std::string& whose);

 private:
  P now_;
};

/// Collects what this thread's phases, and those of its backwards, do for as long as this lives.
/// For tests and debugging.
class PhaseRecorder {
 public:
  struct Change {
    std::string whose;
    std::string from;
    std::string to;
  };

  using Scope = detail::CarriedScope<detail::Carried::kPhaseRecorder, PhaseRecorder*>;

  /// What phases of the type P did.
  template <class P>
  std::vector<Change>& changes() {
    return std::get<Changes<P>>(changes_).list;
  }

 private:
  template <class P>
  struct Changes {
    std::vector<Change> list;
  };

  std::tuple<Changes<IterationPhase>, Changes<UnitPhase>, Changes<GatherPhase>> changes_;
  Scope scope_{this};
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
