#pragma once

#include <memory>
#include <vector>

#include "group/comm_context.h"
#include "group/parameter_group.h"
#include "state/settings.h"
#include "tessera/export.h"
#include "unit/unit_spec.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// The parameters of a unit, in groups, and the communicators that it moves them with. What each
/// function does it does to all groups; see ParameterGroup.
class UnitGroups {
 public:
  /// Shards the parameters. Not collective.
  UnitGroups(const UnitSpec& spec, std::shared_ptr<const Settings> settings);
  UnitGroups(const UnitGroups&) = delete;
  UnitGroups& operator=(const UnitGroups&) = delete;
  ~UnitGroups();

  const DataMesh& mesh() const { return mesh_; }
  std::vector<ParameterGroup>& groups() { return groups_; }

  /// Made at the first call, if none was set.
  const CommContextPtr& shared_comm_context();
  CommContext& comm_context() { return *shared_comm_context(); }
  /// What is under way with another one is finished first.
  void set_comm_context(CommContextPtr context);

  /// Collective. `is_first`: ranks with copies of parameters compare their values; with
  /// TESSERA_DEBUG all compare what parameters they have.
  void prepare(bool is_first);
  /// Copies have had the same update, and the same gradient. Collective.
  void compare_copies() const;
  bool unsharded() const;
  /// Whether all-gathers have begun of which nothing has been used.
  bool is_gathering() const;
  /// Gathers from now on read shards as the compute lane leaves them.
  void follow_compute();
  /// Whether all-gathers have begun.
  bool start_unshard();
  /// After start_unshard(), so that all all-gathers are under way before the first is waited for.
  void unshard();
  /// Puts the unsharded tensors into the slots, or the shards.
  void show();
  void hide();
  bool shown() const;
  void reshard();
  /// Frees what was gathered ahead and not used.
  void reshard_unused();
  /// Keeps pieces for what the step still gathers, where groups keep them.
  void reshard_within_step();
  /// Keeps pieces for backward.
  void reshard_after_forward();
  void drop_pieces();

  /// The ranks of `batch`, of which the groups' meshes may be slices, have a part of the batch
  /// each.
  void set_batch_mesh(const DataMesh& batch);

  bool has_gradients();
  bool awaits_reduction();
  void keep_gradients();
  void drop_gradients();
  /// Whether `tensor` is the unsharded one of the parameter in `slot`, allocated or not.
  bool is_unsharded(const nn::ParameterSlot& slot, const at::Tensor& tensor) const;
  /// See GradientState.
  bool brought_nonfinite(const nn::ParameterSlot& slot) const;
  void reduce();
  /// Forgets the reductions that a failed backward left behind.
  void forget_reductions();

 private:
  DataMesh mesh_;
  std::shared_ptr<const Settings> settings_;
  CommContextPtr comm_context_;
  std::vector<ParameterGroup> groups_;
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
