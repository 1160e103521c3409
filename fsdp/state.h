#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

// The phases of an iteration, a unit and the gather of a group. Which phase may follow which, and
// why, is in the tables of state.cpp, drawn in docs/fsdp.md. Recoveries (a forward or
// backward that failed, an iteration that never came to its backward) are transitions like any
// other.

/// Phases of a root and all units below it.
enum class IterationPhase : std::uint8_t {
  kIdle,              ///< neither forward nor backward runs or is awaited
  kForward,           ///< the root's forward runs
  kAwaitingBackward,  ///< the root's forward has ended, and a result of it needs a gradient
  kBackward,          ///< backward has come to a unit and has not ended
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

class TESSERA_API Unit;

/// A unit's settings that may change between iterations. There is one object for a unit, which its
/// groups read as well; the setters in fully_shard.h say what each does.
struct Settings {
  std::string label;                          ///< what messages call the unit: "unit 'layers.3'"
  std::optional<bool> reshard_after_forward;  ///< default: not for the root
  bool reshard_after_backward = true;
  bool gradient_sync = true;
  bool all_reduce = true;  ///< false: reductions leave out the replicas until one does not
  bool last_backward = true;
  bool unshard_in_backward = true;
  bool unshard_async_op = false;           ///< gathers go to the compute lane
  bool force_sum = false;                  ///< no part of the division comes before the sum
  std::optional<double> gradient_divisor;  ///< default: the number of ranks of each group's mesh
  /// What the next forward's gathers wait for; default: all that was issued.
  std::optional<comm::StreamEventPtr> post_optim_event;
  std::vector<std::weak_ptr<Unit>> forward_prefetch;   ///< empty: what ran after, last time
  std::vector<std::weak_ptr<Unit>> backward_prefetch;  ///< empty: what ran before
  AllReduceHook all_reduce_hook;
  /// What messages call the units of the model that have Options::may_be_unused; one list for all.
  std::shared_ptr<const std::vector<std::string>> may_be_unused;

  /// The end of `error`, about ranks that call different collectives. None where that names a unit
  /// which has the option.
  std::string hint_of_unused_units(const std::string& error) const {
    const auto names = [&](const std::string& unit) {
      return error.find(unit) != std::string::npos;
    };
    return may_be_unused != nullptr && std::ranges::any_of(*may_be_unused, names)
               ? ""
               : "; a unit that only some ranks run needs Options::may_be_unused";
  }
  /// Whether more micro-batches of the step will come.
  bool step_goes_on() const { return !last_backward || !gradient_sync || !all_reduce; }
};

class TESSERA_API Unit;

/// The order in which the last forward of a root used the units that it gathered. The forward under
/// way prefetches by it. Units that were unsharded before do not count: they may run on some ranks
/// alone, while what is gathered must be the same on all.
class GatherOrder {
 public:
  /// A forward begins.
  void begin();
  /// An all-gather of `unit` has begun.
  void gathered(const std::shared_ptr<Unit>& unit);
  /// `unit` is used. False if this forward has not gathered it.
  bool used(const std::shared_ptr<Unit>& unit);
  /// The unit that the last forward used next. nullptr: none, or this forward has left that order.
  std::shared_ptr<Unit> next() const;
  /// The forward has succeeded: the next one is compared with it, unless it gathered nothing.
  void end();

 private:
  std::vector<std::weak_ptr<Unit>> last_;
  std::vector<std::weak_ptr<Unit>> running_;
  std::vector<std::weak_ptr<Unit>> gathered_;
  bool follows_ = false;  ///< this forward has used the first units of `last_`, in order
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
