#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "param.h"
#include "param_group.h"
#include "state.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// Returns the parameters of `modules` and their submodules that are in no unit and not in
/// Options::ignored. Throws Error for a parameter that a module outside of `modules` shares;
/// `caller`: the public function, for the message.
nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules, const Options& options,
                               const char* caller);

/// What fully_shard decides about a unit before the model is changed.
struct UnitSpec {
  std::vector<nn::ModuleBase*> modules;
  DataMesh mesh;
  Options options;
  std::vector<ParameterSpec> parameters;
};

/// Makes the UnitSpec of a unit. Calls the functions in `options` once for each parameter. Throws
/// Error for contradictory options and for parameters that cannot be sharded.
UnitSpec checked_spec(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
                      const DataMesh& mesh, const Options& options);

/// Whether gradients are reduced in buckets (Options::bucket_cap_mb). Requires replicas, one rank
/// in the shard dimension, and no distributed parameter.
bool reduces_in_buckets(const UnitSpec& spec);

/// Groups the parameters by dtype and mesh, and by bucket if reduces_in_buckets(spec). Returns the
/// parameters of each parameter group.
std::vector<std::vector<ParameterSpec>> grouped(const UnitSpec& spec);

/// With several ranks, warns of the first batch norm in `root` that is in no unit and computes
/// batch statistics, because the statistics cover only one rank's batch rows.
void warn_of_batch_norm(const nn::ModuleBase& root, std::int64_t ranks);

/// Returns the parameter groups for the first comparison of origins (ShardedParameter::origin)
/// between ranks.
using ParameterGroupsToCompare = std::function<std::vector<const ParameterGroup*>()>;

struct RowRange {
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// When a training forward begins, ranks exchange their numbers of batch rows and their counts of
/// random operators. A rank that skipped random operators continues with the other ranks' counts.
class RandomAgreement {
 public:
  /// To be called when a training forward of `modules` begins. `dims`: the data-parallel mesh
  /// dimensions. `count`: this rank's number of batch rows. The first two calls are collective;
  /// later calls only if the model has drawn random numbers on any rank. Throws PeerError. Throws
  /// Error if shards of a parameter in `groups` were cut from different tensors.
  void begin_forward(const std::vector<nn::ModuleBase*>& modules,
                     const std::vector<DeviceMesh>& dims,
                     const std::shared_ptr<tessera::detail::BatchRows>& rows, std::int64_t count,
                     const ParameterGroupsToCompare& groups);
  /// The smallest and the largest number of batch rows of a rank in the last exchange.
  const RowRange& rows() const { return rows_; }

 private:
  using Counts = std::vector<std::int64_t>;

  bool compared_origins_ = false;
  Counts agreed_;       ///< counts of random operators at the last comparison
  bool draws_ = false;  ///< whether any rank has drawn random numbers
  RowRange rows_;
  bool quiet_ = false;  ///< whether no rank drew a random number in two forwards
  /// The BatchRows of the last forward that began without an exchange of the batch rows.
  std::shared_ptr<tessera::detail::BatchRows> unasked_;
};

/// The state that the units of one model share: the iteration's phase and the order of the units in
/// forward. Ends backward for all units. Not thread-safe.
class IterationState : public std::enable_shared_from_this<IterationState> {
 public:
  /// `units`: all units in the order of the model's modules, the root first.
  explicit IterationState(const std::vector<std::shared_ptr<Unit>>& units);
  IterationState(const IterationState&) = delete;
  IterationState& operator=(const IterationState&) = delete;
  ~IterationState();

  IterationPhase phase() const { return phase_.now(); }
  /// Whether an iteration has begun and not ended. The next forward ends a failed iteration.
  bool is_open() const;
  /// Whether the backward of this iteration has thrown. The phase then stays kBackward until the
  /// next forward of the root.
  bool backward_failed() const;
  bool is_under_way() const { return is_open() && !backward_failed() && !forward_failed(); }
  /// To be called when a unit is called without the root. Clears the state after a failed forward
  /// or backward.
  void forget_failure();
  /// Whether the root's forward or a backward runs.
  bool runs() const { return is_under_way() && phase() != IterationPhase::kAwaitingBackward; }
  /// Returns the parameter groups, of all units, that are on `mesh` or on a part of `mesh`.
  std::vector<const ParameterGroup*> groups_on(const DeviceMesh& mesh) const;
  /// The units that the program has not destroyed, the root first.
  std::vector<std::shared_ptr<Unit>> units() const;
  /// Whether the model has only one unit, and no other root on this rank has begun an iteration.
  bool is_alone() const;
  bool is_root(const Unit& unit) const { return units_.front().lock().get() == &unit; }

  /// To be called when the root's forward begins. Prepares all units. If the last iteration had no
  /// backward, frees the gathered parameters and returns true. Throws Error within this root's
  /// backward.
  bool begin_forward();
  /// To be called when the root's forward has ended. Throws Error on all ranks if the ranks have
  /// gathered different units. If no backward follows, frees the gathered parameters.
  void end_forward(bool backward_comes);
  void began_gather(Unit& unit);
  /// To be called when the forward of `unit` begins. Returns the unit to prefetch, or nullptr.
  std::shared_ptr<Unit> gather_ahead(Unit& unit);
  /// To be called when `unit` has run forward. `token` expires with the autograd graph of this
  /// forward.
  void ran_forward(Unit& unit, const std::shared_ptr<void>& token);

  void enter_backward();
  /// Returns the unit that ran before `unit` in forward; nullptr if there is none. Removes `unit`
  /// and all later units from forward_order_.
  std::shared_ptr<Unit> ran_before(const Unit& unit);

 private:
  struct Ran {
    Unit* unit;
    std::weak_ptr<void> token;
  };

  void enter(IterationPhase next);
  bool calls_root() const;
  /// Whether the root's forward has thrown: the phase then stays kForward until a unit is called.
  bool forward_failed() const { return phase() == IterationPhase::kForward && !calls_root(); }
  void await_update();
  void settle_gathered();
  void free_unused() const;
  void end_iteration();
  void forget_reductions() const;
  void end_backward();
  void close();
  template <class Act>
  void for_each_group(Act&& act) const;
  void agree_on_gathers();
  void agree_on_gradients();
  bool is_last_backward() const;
  CommContext& comm_context() const;

  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<Ran> forward_order_;  ///< forwards that no backward has reached yet, oldest first
  GatherOrder gather_order_;
  std::weak_ptr<Unit> ahead_;  ///< the unit that a forward prefetched last
  /// A token that expires when autograd drops the callback for the end of the running backward.
  std::weak_ptr<void> backward_;
  Phase<IterationPhase> phase_{IterationPhase::kIdle};
  const comm::World* rank_;  ///< the World identifies this rank
};

/// An FSDP unit: one module, or several modules that run one after another, with their parameters.
/// Inner units keep their own parameters. Hooks gather the parameters and reduce the gradients.
/// docs/fsdp.md draws the phases (UnitPhase). Not thread-safe.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// Shards the parameters. Not collective.
  explicit Unit(const UnitSpec& spec);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  ~Unit();
  /// Adds the hooks of this unit to its modules. From then on the modules own the unit.
  void install();

  Settings& settings() { return *settings_; }
  /// The unit's name in messages: its FQN if a root is known, otherwise the class of its module.
  const std::string& label() const { return settings_->label; }
  const std::unordered_set<nn::SlotPtr>& ignored() const { return ignored_; }
  UnitPhase phase() const { return phase_.now(); }
  const DataMesh& mesh() const { return mesh_; }
  std::vector<ParameterGroup>& groups() { return groups_; }
  CommContext& comm_context() { return *shared_comm_context(); }
  /// Replaces the CommContext. First finishes the work in progress on the old context.
  void set_comm_context(CommContextPtr context);
  /// Throws Error if replicas of parameters or of gradients differ between ranks. Collective.
  void compare_copies() const;
  /// Drops the reductions that a failed backward left in progress.
  void forget_reductions();

  /// Calls the member function `act` of each parameter group's GatheredState or GradientState.
  template <class State, class... Context>
  void each(void (State::*act)(Context&...), Context&... context) {
    for (ParameterGroup& group : groups_) {
      (state<State>(group).*act)(context...);
    }
  }
  template <class State>
  bool any(bool (State::*is)() const) const {
    return std::ranges::any_of(groups_, [is](auto& group) { return (state<State>(group).*is)(); });
  }
  template <class State>
  bool all(bool (State::*is)() const) const {
    return std::ranges::all_of(groups_, [is](auto& group) { return (state<State>(group).*is)(); });
  }

  /// Returns all units with the same root as this unit; only this unit if the root is unknown.
  std::vector<std::shared_ptr<Unit>> units_of_iteration();
  /// Whether the unit has several buckets. If so, gradient hooks of the parameters call
  /// note_gradient().
  bool in_buckets() const { return in_buckets_ && groups_.size() > 1; }
  /// To be called just before the gradient of `parameter` is added to `.grad`. Reduces the buckets
  /// that were complete before this call.
  void note_gradient(const ShardedParameter& parameter);
  /// Whether a module of the unit is running.
  bool is_called() const { return !random_regions_.empty(); }
  /// Whether another unit is the root of this unit. False if the root is not known yet.
  bool is_below_root() const { return iteration_ != nullptr && !is_root(); }
  bool unsharded() const { return all(&GatheredState::unsharded); }

  /// To be called before a gather outside of a root's forward. Later gathers wait for the compute
  /// stream. Frees outdated gathered values. Collective outside of forward and backward.
  void await_compute();
  void start_unshard();
  void unshard();
  void reshard();
  /// Whether the parameter slots (nn::ParameterSlot) contain the unsharded parameters.
  bool installed() const { return all(&GatheredState::installed); }
  /// Puts the shards into the parameter slots (nn::ParameterSlot). The gathered memory stays
  /// allocated for backward.
  void install_sharded() { each(&GatheredState::install_sharded); }
  /// Returns an error message if the program has written to an unsharded parameter after unshard(),
  /// because the write would be lost; otherwise "".
  std::string write_by_hand() const;

  // Hooks for each call of forward, or of a registered method (register_forward_method()).
  void pre_forward(nn::TensorList inputs);
  void post_forward(nn::ModuleBase& module, nn::TensorList outputs);
  /// Called at the end of each call of a module, after all other hooks, even if a hook or the
  /// module has thrown.
  void end_call();

  // IterationState calls the functions from here to end_backward() for each unit.

  /// Frees gathered parameters if no backward followed the forward. If the forward or the backward
  /// threw, also resets the unit's state.
  void abandon_iteration();
  void begin_iteration();
  /// Called when the root's forward has ended. Warns of modules of this unit that did not run, and
  /// ends the unit's forward.
  void end_partial_forward();
  /// Called when backward has ended. Reduces the remaining gradients and frees gathered memory.
  void end_backward();

 private:
  bool is_root() const { return iteration_ != nullptr && iteration_->is_root(*this); }
  bool runs_forward() const;
  void enter(UnitPhase next) { phase_.enter(next, label()); }
  void reset_to_idle();
  void forget_calls();
  void prepare();
  /// Starts the all-gathers of all parameter groups and does not wait. Returns whether any was
  /// started.
  bool start_gathers();
  const CommContextPtr& shared_comm_context();
  template <class State>
  static auto& state(auto& group) {
    if constexpr (std::is_same_v<State, GatheredState>) {
      return group.gathered();
    } else {
      return group.gradients();
    }
  }

  void make_iteration();
  void enter_as_root();
  void refuse_outdated();
  void refuse_write_by_hand() const;
  std::string lost_write(const std::string& writer) const;
  void check_all_in_units();
  void begin_random_region(nn::TensorList inputs);
  void begin_forward(nn::TensorList inputs);
  void end_forward();
  void await_backward(nn::TensorList outputs);
  void free_after_forward();
  void free_after_backward();
  void free_idle_buffers();

  /// A forward of the unit that autograd has recorded. Owned by the autograd graph.
  struct RecordedCall {
    std::vector<const tessera::detail::Node*> results;  ///< autograd nodes of forward's results
    int backward = -1;  ///< id of the last backward that reached the results
  };
  /// Called when backward reaches the unit. `call`: the forward whose results backward has reached;
  /// nullptr if backward has not reached the unit through its results.
  void pre_backward(RecordedCall* call);
  bool is_called_again() const;
  void post_backward(nn::TensorList gradients);
  void prefetch_for_forward();
  void prefetch_for_backward();
  void settle_gradients();
  void begin_buckets();
  bool is_complete(const ParameterGroup& bucket) const;
  std::vector<ParameterGroup*> groups_to_reduce();
  void warn_of_uneven_rows();

  std::vector<nn::ModuleBase*> modules_;
  MixedPrecisionPolicy mp_policy_;
  bool in_buckets_;  ///< whether gradients are reduced in buckets
  std::unordered_set<nn::SlotPtr> ignored_;
  std::shared_ptr<Settings> settings_;
  DataMesh mesh_;
  CommContextPtr comm_context_;
  std::vector<ParameterGroup> groups_;
  std::shared_ptr<IterationState> iteration_;  ///< the root's state; nullptr until a root is known
  Phase<UnitPhase> phase_{UnitPhase::kNew};

  std::optional<c10::ScalarType> restored_dtype_;  ///< inputs' dtype, to which results are cast
  /// Modules of this unit that have not run yet in the current forward.
  std::unordered_set<const nn::ModuleBase*> to_run_;
  bool ran_all_ = false;  ///< whether all modules of this unit have run in this iteration
  std::vector<std::weak_ptr<RecordedCall>> recorded_calls_;
  /// The number of buckets that the current backward has not reduced yet. All ranks reduce buckets
  /// from the last to the first.
  std::size_t buckets_left_ = 0;
  int buckets_backward_ = -1;  ///< id of the backward that can reduce buckets early; -1: none
  /// The parameters whose gradients the backward with id buckets_backward_ has computed.
  std::unordered_set<const ShardedParameter*> noted_;
  bool awaits_call_ = false;  ///< whether the reduction waits for the backward of another call
  bool warned_ = false;       ///< whether a warning about modules that did not run was printed
  /// The random-number scope of each running forward call; nullptr for a call within another scope.
  std::vector<std::unique_ptr<detail::RandomRegionScope>> random_regions_;
  RandomAgreement random_agreement_;  ///< used only if this unit is the root
  bool warned_of_rows_ = false;
  /// Root unit: a hash of all nn::ParameterSlots at the last check_all_in_units().
  std::optional<std::uint64_t> checked_slots_;
  bool follows_abandoned_ = false;  ///< root unit: whether the last iteration had no backward
};

/// Makes a unit and attaches it to its modules, which must not be units yet. Not collective.
void make_unit(const UnitSpec& spec);

/// Returns the unit of `module`. Throws Error if there is none; the message begins with `caller`,
/// the name of the called function.
std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* caller);

/// Returns the units of `module` and, with `recurse`, of its submodules: each unit once, in the
/// order of registration.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse);
/// Like units_of() without `caller`, but throws Error if there is no unit. The message begins with
/// `caller`, the name of the called function.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse,
                                            const char* caller);

/// Returns options of nn::visit_modules that skip FSDP units and their submodules.
nn::detail::ModuleWalk outside_of_units();

// move_inputs() and move_buffers() move tensors to a unit's device. A tensor on this device stays
// the same object. Meta tensors and distributed tensors are not moved.

void move_inputs(nn::TensorList inputs, c10::Device device);

/// Moves the buffers of `modules` and their submodules, except buffers of units and buffers in
/// `ignored`. All references to a buffer see the moved buffer.
void move_buffers(const std::vector<nn::ModuleBase*>& modules, c10::Device device,
                  const std::unordered_set<nn::SlotPtr>& ignored);

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
