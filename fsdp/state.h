#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/detail/streams.h"
#include "tessera/export.h"
#include "tessera/fsdp/fully_shard.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

// The phases of an iteration, of a unit, and of a parameter group's gather. state.cpp has all legal
// transitions; docs/fsdp.md gives the reasons.

/// Phases of a training iteration of a root FSDP unit and the units below the root.
enum class IterationPhase : std::uint8_t {
  kIdle,              ///< no forward or backward runs or will follow
  kForward,           ///< the root's forward runs
  kAwaitingBackward,  ///< the root's forward has ended, and one of its results needs a gradient
  kBackward,          ///< backward has reached a unit and has not ended
};

/// Phases of one FSDP unit.
enum class UnitPhase : std::uint8_t {
  kNew,      ///< the unit's shards are not laid out yet
  kIdle,     ///< neither forward nor backward uses the unit
  kForward,  ///< the unit's modules run; no result so far needs a gradient
  /// The unit's modules run, and autograd has recorded a result that needs a gradient, so a
  /// backward will follow.
  kForwardRecorded,
  kAwaitingBackward,  ///< the unit's modules have run, and a backward will follow
  kBackward,          ///< backward has reached the unit's results but not yet its inputs
};

/// Phases of the parameters of one parameter group.
enum class GatherPhase : std::uint8_t {
  kSharded,    ///< the parameter slots contain the shards; nothing is gathered
  kGathering,  ///< an all-gather has started, and no stream has waited for it yet
  kUnsharded,  ///< the unsharded tensors have the gathered values
};

const char* to_string(IterationPhase phase);
const char* to_string(UnitPhase phase);
const char* to_string(GatherPhase phase);

/// A legal transition from one phase to another.
template <class P>
struct Transition {
  P from;
  P to;
};

/// The table of all legal transitions of the phase type P.
template <class P>
const std::vector<Transition<P>>& legal_transitions();
template <>
const std::vector<Transition<IterationPhase>>& legal_transitions();
template <>
const std::vector<Transition<UnitPhase>>& legal_transitions();
template <>
const std::vector<Transition<GatherPhase>>& legal_transitions();

/// An IterationPhase, UnitPhase or GatherPhase. Only enter() changes the phase. Not thread-safe.
template <class P>
class Phase {
 public:
  explicit Phase(P initial) : now_(initial) {}

  P now() const { return now_; }
  friend bool operator==(const Phase& phase, P value) { return phase.now_ == value; }
  /// Enters `next`. Throws Error, and changes nothing, if legal_transitions() lacks the transition.
  /// `whose`: the owner of the phase for the message ("unit 'a'").
  void enter(P next, const std::string& whose);

 private:
  P now_;
};

class TESSERA_API Unit;

/// The settings of a unit that can change between iterations, shared with the unit's parameter
/// groups. The setters in fully_shard.h document the fields.
struct Settings {
  std::string label;  ///< the unit's name in messages: "unit 'layers.3'"
  std::optional<bool> reshard_after_forward;
  bool reshard_after_backward = true;
  bool gradient_sync = true;
  bool all_reduce = true;  ///< whether to all-reduce gradients over replicas (HSDP)
  bool last_backward = true;
  bool unshard_in_backward = true;
  bool force_sum = false;                  ///< whether to divide gradients only after the sum
  std::optional<double> gradient_divisor;  ///< divisor of gradients; nullopt: the number of ranks
  /// The all-gathers of the next forward wait for this event or, if empty, for all earlier work on
  /// the compute stream.
  std::optional<comm::StreamEventPtr> post_optim_event;
  /// Units that this unit prefetches in forward; if empty: the next unit of the last forward.
  std::vector<std::weak_ptr<Unit>> forward_prefetch;
  /// Units that this unit prefetches in backward; if empty: the unit that ran before this unit.
  std::vector<std::weak_ptr<Unit>> backward_prefetch;
  AllReduceHook all_reduce_hook;

  /// Whether more micro-batches follow before the optimizer steps.
  bool step_goes_on() const { return !last_backward || !gradient_sync || !all_reduce; }
};

/// A hint to append to a message about ranks that call different collectives.
inline constexpr const char* kCallOnEveryRank =
    "; every rank must call each unit: apply fully_shard only to modules that all ranks call";

/// The order in which the root's last forward gathered units, for prefetches in the current
/// forward. Units that were already unsharded are left out, because not all ranks need to run them.
class GatherOrder {
 public:
  void begin();
  /// To be called when an all-gather of `unit` has begun.
  void gathered(const std::shared_ptr<Unit>& unit);
  /// To be called when `unit` is used. Returns false if this forward has not gathered the unit.
  bool used(const std::shared_ptr<Unit>& unit);
  /// Returns the unit that was used next in the last forward; nullptr if there is none or the
  /// orders already differ.
  std::shared_ptr<Unit> next() const;
  /// To be called when the root's forward has succeeded. If this forward gathered units, the next
  /// forward prefetches in the same order.
  void end();

 private:
  std::vector<std::weak_ptr<Unit>> last_;
  std::vector<std::weak_ptr<Unit>> running_;
  std::vector<std::weak_ptr<Unit>> gathered_;
  /// Whether this forward has so far used the units in the order of the last forward.
  bool follows_ = false;
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
