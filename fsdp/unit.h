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
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "param.h"
#include "param_group.h"
#include "state.h"
#include "tessera/core/placement.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/export.h"
#include "tessera/fsdp/options.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/nn/visit_modules.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// The parameters of `modules` and below them that belong to no unit yet and are not ignored.
/// Throws Error for one that a module outside shares.
nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules, const Options& options);

/// The results of the options' functions for a parameter. They are called once.
struct ParameterChoice {
  Placement placement;  ///< on the dimension that shards; a dimension >= 0, where it is in range
  DataMesh mesh;
};

/// For each of `parameters`, of a unit on `mesh`. Throws Error for a mesh that cannot be used.
std::vector<ParameterChoice> choose(const nn::NamedSlots& parameters, const DataMesh& mesh,
                                    const Options& options);

/// All decisions about a unit before anything is changed.
struct UnitSpec {
  std::vector<nn::ModuleBase*> modules;
  DataMesh mesh;
  Options options;
  std::vector<ParameterSpec> parameters;
};

/// From modules, their parameters and what was chosen for each. Throws Error for a parameter that
/// cannot be placed on its mesh as the options say, and for one that gets sparse gradients.
UnitSpec checked_spec(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
                      const std::vector<ParameterChoice>& choices, const DataMesh& mesh,
                      const Options& options);

/// The parameters of a spec by type and mesh: each is a group.
std::vector<std::vector<ParameterSpec>> grouped(const UnitSpec& spec);

/// The modules below a root that are in no unit yet (or all of them), by FQN.
class ModuleTree {
 public:
  struct Node {
    std::string fqn;  ///< the first that leads to the module
    nn::ModuleBase* module;
    std::vector<std::size_t> children;  ///< the nearest ModuleBases below that were not met before
    std::vector<std::string> paths;     ///< all its FQNs: one for each place it is registered at

    /// Whether each of `inner`, FQNs, is below this module or is it.
    bool holds(const std::vector<std::string>& inner) const;
  };

  /// `skip_units`: leaves out modules that are units, with what is below them.
  ModuleTree(const nn::ModuleBase& root, bool skip_units);

  /// Children before their parents; the root is the last.
  const std::vector<Node>& nodes() const { return nodes_; }
  /// nullptr if there is none.
  const Node* find(const std::string& fqn) const;
  /// nullptr if it is not in this tree.
  const Node* find(const nn::ModuleBase* module) const;

 private:
  void add(const std::string& fqn, nn::ModuleBase& module);

  std::vector<Node> nodes_;
  std::unordered_map<const nn::ModuleBase*, std::size_t> index_;
  std::vector<std::size_t> parentless_;  ///< while it is made: nodes whose parent is still to come
};

// What libtorch's modules do that does not go together with FSDP.

/// Throws Error, naming it, for a parameter that gets sparse gradients: reductions take gradients
/// apart by rows, which a sparse one does not have in memory.
void refuse_sparse_gradients(const nn::NamedSlots& parameters);

/// Warns of the first batch norm that is `root` or below it, in no unit yet, and takes statistics
/// of one rank's part of the batch, where the batch is that of several `ranks`.
void warn_of_batch_norm(const nn::ModuleBase& root, std::int64_t ranks);

/// The parameters of a unit, in groups, and what they communicate with. A unit has one group in the
/// usual case; several where its parameters differ in type or mesh (experts). All that is done to
/// the groups goes in the order of the parameters, which is the same on all ranks.
class UnitParameterGroups {
 public:
  /// Shards the parameters. Not collective.
  UnitParameterGroups(const UnitSpec& spec, std::shared_ptr<const Settings> settings);
  UnitParameterGroups(const UnitParameterGroups&) = delete;
  UnitParameterGroups& operator=(const UnitParameterGroups&) = delete;
  ~UnitParameterGroups();

  const DataMesh& mesh() const { return mesh_; }
  std::vector<ParameterGroup>& groups() { return groups_; }
  const std::vector<ParameterGroup>& groups() const { return groups_; }

  /// Made at the first call, if none was set.
  const CommContextPtr& shared_comm_context();
  CommContext& comm_context() { return *shared_comm_context(); }
  /// What is under way with another one is finished first.
  void set_comm_context(CommContextPtr context);

  /// Calls `act` of each group's gathered state or gradient state.
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

  /// Collective. `is_first`: ranks with copies of parameters compare their values; with
  /// TESSERA_DEBUG all compare what parameters they have.
  void prepare(bool is_first);
  /// Copies have had the same update, and the same gradient. Collective.
  void compare_copies() const;
  /// Gathers from now on read shards as the compute lane leaves them.
  void follow_compute();
  /// Whether all-gathers have begun. All of them are under way before the first is waited for.
  bool start_unshard();

  /// Each rank of `batch` has a part of the batch. The groups' meshes may be slices of it.
  void set_batch_mesh(const DataMesh& batch);

  /// Whether `tensor` is the unsharded one of the parameter in `slot`, allocated or not.
  bool is_unsharded(const nn::ParameterSlot& slot, const at::Tensor& tensor) const;
  /// Forgets the reductions that a failed backward left behind.
  void forget_reductions();

 private:
  template <class State>
  static auto& state(auto& group) {
    if constexpr (std::is_same_v<State, GatheredState>) {
      return group.gathered();
    } else {
      return group.gradients();
    }
  }

  DataMesh mesh_;
  std::shared_ptr<const Settings> settings_;
  CommContextPtr comm_context_;
  std::vector<ParameterGroup> groups_;
};

/// RequestedParameter once.
using ParameterGroupsToCompare = std::function<std::vector<const ParameterGroup*>()>;

/// The least and the most that a rank has.
struct RowRange {
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// What the ranks exchange about random numbers when a training forward of a model begins: how many
/// rows they have, and how many random operators they have counted. A rank that skipped some, as
/// one without rows may, continues with the others' counts.
class RandomAgreement {
 public:
  /// A training forward of the model of `modules` begins on the ranks of `dims`, which together
  /// have `rows`; this rank has `count` of them. The first exchange includes the origins of
  /// `groups`, which must be the same on all ranks. Collective over the ranks, between the hosts,
  /// in the first two forwards, and in later ones if the model has drawn (all ranks then know
  /// that). A model that draws nothing pays nothing. Throws PeerError, and Error on all ranks that
  /// share a parameter whose shards come from different tensors.
  void begin_forward(const std::vector<nn::ModuleBase*>& modules,
                     const std::vector<DeviceMesh>& dims,
                     const std::shared_ptr<tessera::detail::BatchRows>& rows, std::int64_t count,
                     const ParameterGroupsToCompare& groups);
  /// How many rows the ranks had when they last compared them.
  const RowRange& rows() const { return rows_; }

 private:
  using Counts = std::vector<std::int64_t>;

  bool compared_origins_ = false;
  Counts agreed_;       ///< in the last forward that compared them; empty: none has
  bool draws_ = false;  ///< on any rank
  RowRange rows_;
  bool quiet_ = false;  ///< two forwards have compared them, and nothing was drawn
  /// The rows of the forward before this one, where its ranks did not compare them.
  std::shared_ptr<tessera::detail::BatchRows> unasked_;
};

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
  void settle_gathered();
  void free_unused() const;
  void end_iteration();
  /// Those that a failed backward left behind.
  void forget_reductions() const;
  void end_backward();
  /// Nothing is under way any more.
  void close();
  template <class Act>
  void for_each_group(Act&& act) const;
  void agree_on_gathers();
  void agree_on_gradients();
  void agree_on_use();
  bool is_last_backward() const;
  CommContext& comm_context() const;

  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<Ran> forward_order_;  ///< forwards whose graphs may have a backward to come
  GatherOrder gather_order_;
  std::weak_ptr<Unit> ahead_;  ///< what forward has gathered ahead last
  /// Held by what autograd calls at the end of the backward under way, and goes with it.
  std::weak_ptr<void> backward_;
  Phase<IterationPhase> phase_{IterationPhase::kIdle};
};

/// What fully_shard made of one module, or of several that run one after another: their parameters,
/// minus those of units below, and the hooks that gather and reduce them. UnitPhase says what
/// happens when; docs/fsdp.md draws it. For one thread at a time.
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
  bool installed() const { return groups_.all(&GatheredState::installed); }
  /// Puts the shards into the slots, as between calls, and keeps what is gathered for backward.
  void install_sharded() { groups_.each(&GatheredState::install_sharded); }
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

 private:
  bool is_root() const { return iteration_ != nullptr && iteration_->is_root(*this); }
  bool runs_forward() const;
  void enter(UnitPhase next) { phase_.enter(next, label()); }
  /// Enters kIdle, from any phase.
  void reset_to_idle();
  void prepare();

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

  /// A call that autograd has recorded. Its graph owns it.
  struct RecordedCall {
    std::vector<const tessera::detail::Node*> results;  ///< the nodes that made its results
    int backward = -1;                                  ///< the last backward that has come to it
  };
  /// `call`: whose results' gradient has come; nullptr: of another call.
  void pre_backward(RecordedCall* call);
  bool is_called_again() const;
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
  std::vector<std::weak_ptr<RecordedCall>> recorded_calls_;
  bool awaits_call_ = false;  ///< gradients are reduced when backward has passed another call
  bool warned_ = false;       ///< about modules that did not run
  /// One for each call under way; nullptr: it is in that of another.
  std::vector<std::unique_ptr<detail::RandomRegionScope>> random_regions_;
  RandomAgreement random_agreement_;  ///< used in the root alone
  bool warned_of_rows_ = false;
  /// The root: of the model's slots when they were last checked (check_all_in_units).
  std::optional<std::uint64_t> checked_slots_;
  bool follows_abandoned_ = false;  ///< the root's forward: one that never came to its backward
};

/// Makes a unit of modules that are not units yet, and attaches it to them. Not collective.
void make_unit(const UnitSpec& spec);

/// The unit of `module`. Throws Error, in the name of the called function `asked`, if it has none.
std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* asked);

/// The units of `module` and, if `recurse`, of the modules below it, each once, in the order of
/// registration.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse);
/// The same. Throws Error, in the name of the called function `asked`, if there is none.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse,
                                            const char* asked);

/// A walk over the modules that are in no unit yet.
nn::ModuleWalk outside_of_units();

// The tensors that enter a unit's forward and leave it. The unit computes on its device, in the
// type of its policy. A tensor that already fits stays the same object. Tensors without values
// (meta) and distributed tensors, whose mesh has a device, are not moved.

/// Moves the arguments of a forward, differentiably.
void move_inputs(nn::TensorList inputs, c10::Device device);

/// Moves the buffers of `modules` and below them, but for those of units and those in `ignored`.
/// Who holds a buffer (nn::Parameter, a tensor that libtorch's register_buffer returned) sees it
/// moved.
void move_buffers(const std::vector<nn::ModuleBase*>& modules, c10::Device device,
                  const std::unordered_set<nn::SlotPtr>& ignored);

/// Casts the floating-point tensors among `tensors` to `dtype`, differentiably; does nothing
/// without a type.
void cast_floating(nn::TensorList tensors, std::optional<c10::ScalarType> dtype);

/// The type of the first floating-point tensor.
std::optional<c10::ScalarType> floating_type(nn::TensorList tensors);

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
