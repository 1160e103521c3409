#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "parameter_group/comm_context.h"
#include "parameter_group/parameter_group.h"
#include "state/settings.h"
#include "tessera/export.h"
#include "unit/unit_spec.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

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
  /// Keeps pieces for what the step still gathers, where groups keep them.
  void reshard_within_step();

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

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
