#pragma once

#include <memory>
#include <vector>

#include "parameter_group/comm_context.h"
#include "state/gather_order.h"
#include "state/phases.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::fsdp {

class TESSERA_API Unit;

/// What the units of one model share: the phase of the iteration, the order in which they ran
/// forward, by which backward and the next forward prefetch, and what is to be done once backward
/// ends. For one thread at a time.
class IterationState : public std::enable_shared_from_this<IterationState> {
 public:
  /// The units in the order of the model's modules, the root first.
  explicit IterationState(const std::vector<std::shared_ptr<Unit>>& units);

  IterationPhase phase() const { return phase_.now(); }
  /// Whether a forward or backward has begun that has not ended, or has failed.
  bool is_open() const;
  /// Whether backward has thrown: the phase stays kBackward until the root's next forward.
  bool backward_failed() const;
  bool is_under_way() const { return is_open() && !backward_failed(); }
  /// Whether the root's forward or a backward runs.
  bool runs() const { return is_under_way() && phase() != IterationPhase::kAwaitingBackward; }
  /// The groups of all units whose ranks are among those of `mesh`.
  std::vector<const ParameterGroup*> groups_on(const DeviceMesh& mesh) const;
  /// The root is first.
  std::vector<std::shared_ptr<Unit>> units() const;
  bool is_root(const Unit& unit) const { return units_.front().lock().get() == &unit; }

  /// The root's forward begins: prepares all units. An earlier iteration may never have come to its
  /// backward: what it left gathered is freed, since the shards may have changed. Throws Error, and
  /// changes nothing, within this root's backward. Returns whether there was such an iteration.
  bool begin_forward();
  /// The root's forward has ended. Ends the forward of units of several modules that did not all
  /// run. Throws Error on all ranks if they have not gathered the same units. If no backward comes,
  /// frees what is still gathered.
  void end_forward(bool backward_comes);
  /// An all-gather of `unit` has begun.
  void began_gather(Unit& unit);
  /// `unit` begins its forward: the unit to gather ahead, one at a time, or nullptr.
  std::shared_ptr<Unit> gather_ahead(Unit& unit);
  /// `unit` has run forward; backward may come to it as long as `token` is held.
  void ran_forward(Unit& unit, const std::shared_ptr<void>& token);

  /// Backward has come to a unit.
  void enter_backward();
  /// The unit whose forward ran before that of `unit`, or nullptr; forgets what ran from then on.
  std::shared_ptr<Unit> ran_before(const Unit& unit);

 private:
  struct Ran {
    Unit* unit;
    std::weak_ptr<void> token;
  };

  void enter(IterationPhase next);
  void await_update();
  void settle_gathered(bool begins_step);
  void free_unused() const;
  void end_iteration();
  /// Those that a failed backward left behind.
  void forget_reductions() const;
  void end_backward();
  void end_micro_batch();
  /// Nothing is under way any more.
  void close(IterationPhase next);
  template <class Act>
  void for_each_group(Act&& act) const;
  void agree_on_gathers();
  void agree_on_gradients();
  void agree_on_use();
  bool is_last_backward() const;
  bool step_goes_on() const;
  CommContext& comm_context() const;

  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<Ran> forward_order_;  ///< forwards whose graphs may have a backward to come
  GatherOrder gather_order_;
  std::weak_ptr<Unit> ahead_;  ///< what forward has gathered ahead last
  /// Held by what autograd calls at the end of the backward under way, and goes with it.
  std::weak_ptr<void> backward_;
  Phase<IterationPhase> phase_{IterationPhase::kBetweenSteps};
};

}  // namespace tessera::fsdp
