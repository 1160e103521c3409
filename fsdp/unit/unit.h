#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "agreement/random_agreement.h"
#include "state/phases.h"
#include "state/settings.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"
#include "unit/iteration_state.h"
#include "unit/unit_parameter_groups.h"
#include "unit/unit_spec.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// What fully_shard made of one module, or of several that run one after another: their parameters,
/// minus those of units below, and the hooks that gather and reduce them. UnitPhase says what
/// happens when; docs/fsdp_states.md draws it. For one thread at a time.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// Shards the parameters. Not collective.
  explicit Unit(const UnitSpec& spec);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  /// Adds the hooks to the modules, which keep this alive.
  void install();

  Settings& settings() { return *settings_; }
  /// By its FQN, once a root is known; before, by its class.
  const std::string& label() const { return settings_->label; }
  bool may_be_unused() const { return may_be_unused_; }
  /// What Options::ignored named.
  const std::unordered_set<nn::SlotPtr>& ignored() const { return ignored_; }
  UnitPhase phase() const { return phase_.now(); }
  UnitParameterGroups& parameters() { return groups_; }
  std::vector<ParameterGroup>& groups() { return groups_.groups(); }
  CommContext& comm_context() { return groups_.comm_context(); }
  /// All units of the root's model. If no root is known: this one alone.
  std::vector<std::shared_ptr<Unit>> units_of_iteration();
  /// Whether a root is known, and is another.
  bool is_below_root() const { return iteration_ != nullptr && !is_root(); }
  bool unsharded() const { return groups_.all(&GatheredState::unsharded); }

  /// Later gathers read shards as the compute lane leaves them, not as an earlier micro-batch did,
  /// and what is gathered of shards that were written since is freed: for gathers outside of a
  /// root's forward, which itself does both. Collective outside of forward and backward.
  void await_compute();
  void start_unshard();
  void unshard();
  void reshard();
  /// Whether the slots hold the unsharded parameters.
  bool shown() const { return groups_.all(&GatheredState::shown); }
  /// Puts the shards into the slots, as between calls, and keeps what is gathered for backward.
  void hide() { groups_.each(&GatheredState::hide); }
  /// What is wrong where the program has written to parameters that it has unsharded itself; ""
  /// if it has not.
  std::string write_by_hand() const;

  // Around a call of a module's method that uses its parameters.
  void pre_forward(nn::TensorList inputs);
  void post_forward(nn::ModuleBase& module, nn::TensorList outputs);
  /// After the others, also if one of them or the call has thrown.
  void end_call();

  // Called by IterationState for all units.

  /// An earlier iteration never came to its backward: frees what it left.
  void abandon_iteration();
  /// The root's forward begins.
  void begin_iteration();
  /// Gathers a unit that may be unused, which some ranks alone may come to; nothing if it is
  /// unsharded. Collective.
  void gather_on_all_ranks();
  /// The root's forward has ended: warns of modules of this unit that did not run, and ends its
  /// forward.
  void end_partial_forward();
  /// Backward has ended: reduces what is left and frees what is still gathered.
  void end_backward();
  /// A micro-batch has ended: after the last one of the step, forgets the pieces that were kept.
  void end_micro_batch();

 private:
  bool is_root() const { return iteration_ != nullptr && iteration_->is_root(*this); }
  bool runs_forward() const;
  void enter(UnitPhase next) { phase_.enter(next, label()); }
  /// Enters kIdle, from any phase.
  void rest();
  void prepare();

  void make_iteration();
  void enter_as_root();
  void refuse_outdated();
  void refuse_write_by_hand() const;
  std::string lost_write(const std::string& writer) const;
  void check_outside();
  void begin_random_region(nn::TensorList inputs);
  void begin_forward(nn::TensorList inputs);
  void end_forward();
  void await_backward(nn::TensorList outputs);
  void free_after_forward();
  void free_after_backward();
  void free_idle_buffers();

  void pre_backward();
  void post_backward(nn::TensorList gradients);
  void prefetch_for_forward();
  void prefetch_for_backward();
  void settle_gradients();
  void warn_of_uneven_rows();

  std::vector<nn::ModuleBase*> modules_;
  MixedPrecisionPolicy mp_policy_;
  bool may_be_unused_;
  std::unordered_set<nn::SlotPtr> ignored_;
  std::shared_ptr<Settings> settings_;
  UnitParameterGroups groups_;
  std::shared_ptr<IterationState> iteration_;  ///< nullptr: no root is known yet
  Phase<UnitPhase> phase_{UnitPhase::kNew};

  std::optional<c10::ScalarType> restored_dtype_;  ///< type of the results of the call under way
  /// Modules of this unit that the forward under way has not run yet.
  std::unordered_set<const nn::ModuleBase*> to_run_;
  bool warned_ = false;  ///< about modules that did not run
  /// One for each call under way; nullptr: it is in that of another.
  std::vector<std::unique_ptr<detail::RandomRegionScope>> random_regions_;
  RandomAgreement random_agreement_;  ///< used in the root alone
  bool warned_of_rows_ = false;
  bool checked_outside_ = false;    ///< the root: that no parameter around it was forgotten
  bool follows_abandoned_ = false;  ///< the root's forward: one that never came to its backward
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
