#include "unit/unit_parameter_groups.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <optional>
#include <string>
#include <utility>

#include "comm/data_mesh.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"

namespace tessera::fsdp {
namespace {

// Compares the copies of parameters that FSDP's ranks hold, by a hash. A copy that differs would
// train on without an error: gradients are averaged over copies, values are not.

// Ranks hold copies of parameters: of all of them with replicas (HSDP, replicate()), and of the
// parameters that are not split among the ranks that shard.

using tessera::detail::Equality;
using tessera::detail::Replica;

enum class Of : std::uint8_t { kValues, kGradients };

Replica copy_of(const ShardedParameter& parameter, Of of) {
  const std::string name = "parameter '" + parameter.name() + "'";
  if (of == Of::kValues) {
    return {name, parameter.shard()};
  }
  const at::Tensor& gradient = parameter.gradient();
  return {"the gradient of " + name, gradient.defined() ? local_tensor(gradient) : at::Tensor()};
}

/// `all`: of every parameter, else of those that are not split.
std::vector<Replica> copies(const ParameterGroup& group, bool all, Of of) {
  std::vector<Replica> replicas;
  for (const ShardedParameter& parameter : group.parameters()) {
    if (!parameter.sharded().is_meta() && (all || !parameter.shape().dim)) {
      replicas.push_back(copy_of(parameter, of));
    }
  }
  return replicas;
}

/// Throws Error, on all ranks that hold copies of it, for a parameter of the unit that messages
/// call `label` whose copies, or those of its gradient, differ. Collective over the groups' meshes;
/// no traffic.
void check_copies(const std::vector<ParameterGroup>& groups, Equality equality, Of of,
                  const std::string& label) {
  const c10::AutoGradMode no_grad(false);
  const std::string remedy =
      of == Of::kValues
          ? "give all ranks the same values (one seed, nn::init_weights, a checkpoint)"
          : "the copies would drift apart: a gradient was changed on some ranks";
  for (const ParameterGroup& group : groups) {
    const auto compare = [&](const DeviceMesh& mesh, bool all) {
      const std::vector<Replica> replicas = copies(group, all, of);
      if (mesh && mesh.size() > 1 && !replicas.empty()) {
        tessera::detail::check_replicas(tessera::detail::peers_of(mesh), replicas, equality, label,
                                        remedy);
      }
    };
    compare(group.mesh().shard, false);
    compare(group.mesh().replicate, true);
  }
}

// A debug check, at a unit's first gather, that all ranks have built the same model. Shards are
// padded to one size, so that collectives of different parameters may succeed and give each rank
// the values of another parameter; nothing else would notice.

using Numbers = std::vector<std::int64_t>;

/// Sent instead of the text, whose length differs; the ranks print only their own.
std::int64_t hash_of_line(const std::string& text) {
  return std::bit_cast<std::int64_t>(stream_of(text.c_str()));
}

/// The parameters of some groups, one line each.
std::vector<std::string> lines_of(const std::vector<const ParameterGroup*>& groups) {
  std::vector<std::string> lines;
  for (const ParameterGroup* group : groups) {
    for (const ShardedParameter& parameter : group->parameters()) {
      lines.push_back(fmt::format("'{}' of sizes [{}], {}", parameter.name(),
                                  fmt::join(parameter.sharded().sizes(), ", "),
                                  c10::toString(parameter.dtype())));
    }
  }
  return lines;
}

/// What is wrong on `mesh`, empty if nothing; the same on all ranks but for what they have
/// themselves. `earlier`: what was found on the meshes before. Collective.
std::string compare(const DeviceMesh& mesh, c10::Device device,
                    const std::vector<std::string>& lines, const std::string& earlier) {
  Numbers hashes;
  std::ranges::transform(lines, std::back_inserter(hashes), hash_of_line);
  const auto differs_from_first = [](const std::vector<Numbers>& all, std::size_t i) {
    const auto found = std::ranges::find_if(
        all, [&](const Numbers& numbers) { return numbers[i] != all.front()[i]; });
    return static_cast<std::size_t>(found - all.begin());
  };
  const auto name = [&](std::size_t rank) { return mesh.ranks()[rank]; };

  // Counts first: gather_values needs as many numbers from every rank.
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const std::vector<Numbers> counts = comm::gather_values(
      group, device, {static_cast<std::int64_t>(lines.size()), earlier.empty() ? 0 : 1});
  if (const std::size_t other = differs_from_first(counts, 0); other < counts.size()) {
    return fmt::format("rank {} has {} parameters, rank {} has {}", name(0), counts[0][0],
                       name(other), counts[other][0]);
  }
  const auto mismatched =
      std::ranges::find_if(counts, [](const Numbers& own) { return own[1] != 0; });
  // Goes around with the counts, so that ranks of a larger mesh learn what a smaller one found and
  // all of them throw.
  if (!earlier.empty()) {
    return earlier;
  }
  if (mismatched != counts.end()) {
    return fmt::format("rank {} has others than a rank that it shares them with",
                       name(static_cast<std::size_t>(mismatched - counts.begin())));
  }
  if (lines.empty()) {
    return "";
  }
  const std::vector<Numbers> all = comm::gather_values(group, device, hashes);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (const std::size_t other = differs_from_first(all, i); other < all.size()) {
      return fmt::format("parameter {} differs between rank {} and rank {}; on rank {} it is {}", i,
                         name(0), name(other), mesh.world()->rank(), lines[i]);
    }
  }
  return "";
}

/// With TESSERA_DEBUG=1, throws Error unless all ranks of `mesh`, and of the groups' own meshes,
/// have parameters of the same names, sizes and types in the unit that messages call `label`: then
/// on all of them. Padded shards may be equal where the parameters are not. Collective then; else
/// it does nothing.
void check_same_parameters(std::vector<ParameterGroup>& groups, const DataMesh& mesh,
                           const std::string& label) {
  if (!tessera::detail::debug_checks()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  // Small meshes first, the unit's last: it stops ranks that would continue with the next unit.
  std::vector<std::pair<DeviceMesh, std::vector<const ParameterGroup*>>> meshes;
  for (const ParameterGroup& group : groups) {
    const DeviceMesh& own = group.mesh().all;
    auto known = std::ranges::find(meshes, own, [](const auto& entry) { return entry.first; });
    if (known == meshes.end()) {
      known = meshes.insert(meshes.end(), {own, {}});
    }
    known->second.push_back(&group);
  }
  if (std::ranges::find(meshes, mesh.all, [](const auto& entry) { return entry.first; }) ==
      meshes.end()) {
    meshes.push_back({mesh.all, {}});
  }
  std::ranges::stable_sort(meshes, {}, [&](const auto& entry) {
    return std::pair(entry.first == mesh.all, entry.first.size());
  });
  std::string difference;
  for (const auto& [own, members] : meshes) {
    difference = compare(own, mesh.device(), lines_of(members), difference);
  }
  TESSERA_CHECK(difference.empty(), label, ": ranks have other parameters: ", difference,
                "; make the same model on every rank");
}

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

UnitParameterGroups::UnitParameterGroups(const UnitSpec& spec,
                                         std::shared_ptr<const Settings> settings)
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
UnitParameterGroups::~UnitParameterGroups() {
  // The context holds pointers to the groups' gradient states.
  forget_reductions();
}

/// Not in the constructor: with share_context or a root, most units never need their own.
const CommContextPtr& UnitParameterGroups::shared_comm_context() {
  if (comm_context_ == nullptr) {
    comm_context_ =
        std::make_shared<CommContext>(comm::make_streams(mesh_.device()), mesh_.device());
  }
  return comm_context_;
}

void UnitParameterGroups::set_comm_context(CommContextPtr context) {
  if (comm_context_ != nullptr && comm_context_ != context) {
    // Otherwise nobody would finish the reductions that are under way there.
    comm_context_->settle();
  }
  comm_context_ = std::move(context);
}

void UnitParameterGroups::prepare(bool is_first) {
  const OutsideInferenceMode ordinary;
  if (is_first) {
    check_same_parameters(groups_, mesh_, settings_->label);
  }
  for (ParameterGroup& group : groups_) {
    group.prepare(comm_context());
  }
  // Only now: shards may have been put into the slots since they were made.
  if (is_first) {
    check_copies(groups_, Equality::kBitwise, Of::kValues, settings_->label);
  }
}

void UnitParameterGroups::compare_copies() const {
  check_copies(groups_, Equality::kRounded, Of::kValues, settings_->label);
  check_copies(groups_, Equality::kRounded, Of::kGradients, settings_->label);
}

/// In the compute lane they do so anyway.
void UnitParameterGroups::follow_compute() {
  if (!settings_->unshard_async_op) {
    comm_context().streams().order(comm::Lane::kCompute, comm::Lane::kAllGather);
  }
}

bool UnitParameterGroups::start_unshard() {
  const OutsideInferenceMode ordinary;  // buffers go to the pool
  bool began = false;
  for (ParameterGroup& group : groups_) {
    began |= group.gathered().start_unshard(comm_context());
  }
  return began;
}

void UnitParameterGroups::reshard_within_step() {
  for (ParameterGroup& group : groups_) {
    GatheredState& gathered = group.gathered();
    // Pieces are kept over micro-batches only on a mesh with replicas (shard_over_replicas).
    gathered.keeps_pieces() ? gathered.reshard_for_now(comm_context())
                            : gathered.reshard(comm_context());
  }
}

/// Experts are reduced over the ranks that hold the same ones. The loss is the mean over all ranks
/// with rows of their own, and so is divided by these.
void UnitParameterGroups::set_batch_mesh(const DataMesh& batch) {
  for (ParameterGroup& group : groups_) {
    if (is_slice(group.mesh().all, batch.all)) {
      group.gradients().set_batch_ranks(batch.ranks());
    }
  }
}

bool UnitParameterGroups::is_unsharded(const nn::ParameterSlot& slot,
                                       const at::Tensor& tensor) const {
  return std::ranges::any_of(groups_, [&](const ParameterGroup& group) {
    return std::ranges::any_of(group.parameters(), [&](const ShardedParameter& parameter) {
      return parameter.slot().get() == &slot && parameter.unsharded().is_same(tensor);
    });
  });
}

void UnitParameterGroups::forget_reductions() {
  if (comm_context_ != nullptr) {
    comm_context_->forget(groups_);
  }
}

}  // namespace tessera::fsdp
