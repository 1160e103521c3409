#include "unit/unit_groups.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "agreement/copy_agreement.h"
#include "agreement/parameter_agreement.h"

namespace tessera::fsdp {
namespace {

/// Ends inference mode, if it is on, for as long as this lives: what is made then outlives the
/// call, and training needs it, too.
class OutsideInferenceMode {
 public:
  OutsideInferenceMode() {
    if (c10::InferenceMode::is_enabled()) {
      off_.emplace(false);
    }
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

}  // namespace

UnitGroups::UnitGroups(const UnitSpec& spec, std::shared_ptr<const Settings> settings)
    : mesh_(spec.mesh), settings_(std::move(settings)) {
  // Groups are made once: a conversion later changes their layout, never their members.
  const Options& options = spec.options;
  for (const std::vector<ParameterSpec>& parameters : grouped(spec)) {
    groups_.emplace_back(parameters, options.mp_policy, options.post_forward_mesh_size, settings_);
  }
  // Experts: other slices of the unit's mesh hold other parameters, which norms must count. Of one
  // tensor that is split over these slices as well, its own mesh says it.
  for (const ParameterSpec& parameter : spec.parameters) {
    if (parameter.mesh.all != mesh_.all && !is_slice(mesh_.all, parameter.sharding.mesh)) {
      parameter.slot->set_distinct_along(mesh_.all);
    }
  }
}

/// With a shared context, what others reduce goes on.
UnitGroups::~UnitGroups() {
  // The context holds pointers to the groups' gradient states.
  forget_reductions();
}

/// Not in the constructor: with share_context or a root, most units never need their own.
const CommContextPtr& UnitGroups::shared_comm_context() {
  if (comm_context_ == nullptr) {
    comm_context_ =
        std::make_shared<CommContext>(comm::make_streams(mesh_.device()), mesh_.device());
  }
  return comm_context_;
}

void UnitGroups::set_comm_context(CommContextPtr context) {
  if (comm_context_ != nullptr && comm_context_ != context) {
    // Otherwise nobody would finish the reductions that are under way there.
    comm_context_->settle();
  }
  comm_context_ = std::move(context);
}

void UnitGroups::prepare(bool is_first) {
  const OutsideInferenceMode ordinary;
  if (is_first) {
    check_same_parameters(groups_, mesh_, settings_->label);
  }
  for (ParameterGroup& group : groups_) {
    group.prepare(comm_context());
  }
  // Only now: shards may have been put into the slots since they were made.
  if (is_first) {
    check_copies(groups_, tessera::detail::Equality::kBitwise, settings_->label);
  }
}

void UnitGroups::compare_copies() const {
  check_copies(groups_, tessera::detail::Equality::kRounded, settings_->label);
  check_copies_of_gradients(groups_, settings_->label);
}

/// In the compute lane they do so anyway.
void UnitGroups::follow_compute() {
  if (!settings_->unshard_async_op) {
    comm_context().streams().order(comm::Lane::kCompute, comm::Lane::kAllGather);
  }
}

bool UnitGroups::start_unshard() {
  const OutsideInferenceMode ordinary;  // buffers go to the pool
  bool began = false;
  for (ParameterGroup& group : groups_) {
    began |= group.gathered().start_unshard(comm_context());
  }
  return began;
}

void UnitGroups::reshard_within_step() {
  for (ParameterGroup& group : groups_) {
    GatheredState& gathered = group.gathered();
    // Pieces are kept over micro-batches only on a mesh with replicas (shard_over_replicas).
    gathered.keeps_pieces() ? gathered.reshard_for_now(comm_context())
                            : gathered.reshard(comm_context());
  }
}

/// Experts are reduced over the ranks that hold the same ones. The loss is the mean over all ranks
/// with rows of their own, and so is divided by these.
void UnitGroups::set_batch_mesh(const DataMesh& batch) {
  for (ParameterGroup& group : groups_) {
    if (is_slice(group.mesh().all, batch.all)) {
      group.gradients().set_batch_ranks(batch.ranks());
    }
  }
}

bool UnitGroups::is_unsharded(const nn::ParameterSlot& slot, const at::Tensor& tensor) const {
  return std::ranges::any_of(groups_, [&](const ParameterGroup& group) {
    return std::ranges::any_of(group.parameters(), [&](const ShardedParameter& parameter) {
      return parameter.slot().get() == &slot && parameter.unsharded().is_same(tensor);
    });
  });
}

void UnitGroups::forget_reductions() {
  if (comm_context_ != nullptr) {
    comm_context_->forget(groups_);
  }
}

}  // namespace tessera::fsdp
