#include "unit.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "buffers.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/visit_modules.h"

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

UnitParameterGroups::~UnitParameterGroups() {
  // The context holds pointers to the groups' gradient states.
  forget_reductions();
}

/// Not in the constructor: units below a root use the root's.
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

// Whether a model draws random numbers is unknown before its forward. A rank may skip all random
// operators: a comparison of rows that the first of them started would wait for that rank. So the
// ranks compare when the forward begins, until it is known that nothing is drawn.

namespace {

using Counts = std::vector<std::int64_t>;

std::vector<nn::Dropout*> dropouts_of(const std::vector<nn::ModuleBase*>& modules) {
  std::vector<nn::Dropout*> found;
  for (nn::ModuleBase* module : modules) {
    nn::visit_modules(*module, [&](const std::string&, nn::ModuleBase& below) {
      if (auto* dropout = dynamic_cast<nn::Dropout*>(&below)) {
        found.push_back(dropout);
      }
    });
  }
  return found;
}

/// Those of at:: first.
Counts counts_of(const std::vector<nn::Dropout*>& dropouts) {
  Counts counts{static_cast<std::int64_t>(random_state().calls)};
  for (const nn::Dropout* dropout : dropouts) {
    counts.push_back(static_cast<std::int64_t>(dropout->calls()));
  }
  return counts;
}

void set_counts(const std::vector<nn::Dropout*>& dropouts, const Counts& counts) {
  set_random_state({random_state().seed, static_cast<std::uint64_t>(counts.front())});
  for (std::size_t i = 0; i < dropouts.size(); ++i) {
    dropouts[i]->set_calls(static_cast<std::uint64_t>(counts[i + 1]));
  }
}

std::int64_t hash_of(const Counts& counts) {
  std::uint64_t hash = 0;
  for (const std::int64_t count : counts) {
    hash = substream(hash, static_cast<std::uint64_t>(count));
  }
  return static_cast<std::int64_t>(hash);
}

/// `counts` become the largest of all ranks'.
void raise_to_largest(Counts& counts, const std::vector<DeviceMesh>& dims) {
  for (const DeviceMesh& dim : dims) {
    if (dim.size() == 1) {
      continue;
    }
    for (const Counts& other : comm::gather_on_hosts(dim.group(), Counts(counts))) {
      std::ranges::transform(counts, other, counts.begin(), std::ranges::max);
    }
  }
}

// Shards of one parameter must be parts of one tensor: of one that all ranks had, or of one seed.
// Parts of different tensors fit together as well, and train without an error. The values do not
// show that, so the ranks compare what they were cut from, or filled by.

/// The hash of all origins (ShardedParameter::origin) on this rank.
std::int64_t hash_of_origins(const std::vector<const ParameterGroup*>& groups) {
  Counts origins;
  for (const ParameterGroup* group : groups) {
    std::ranges::transform(group->parameters(), std::back_inserter(origins),
                           &ShardedParameter::origin);
  }
  return hash_of(origins);
}

/// What differs in `group`; empty: nothing. A rank without a part, or that loaded its part, has no
/// origin to compare.
std::string different_origins(const ParameterGroup& group) {
  const DeviceMesh& mesh = group.mesh().shard;
  if (mesh.size() == 1) {
    return "";
  }
  std::vector<std::pair<std::string, std::int64_t>> origins;
  for (const ShardedParameter& parameter : group.parameters()) {
    origins.emplace_back(describe(*parameter.slot()), parameter.origin());
  }
  return nn::detail::different_origins(mesh, origins);
}

/// For ranks whose hashes differ: they compare parameter by parameter. Collective over the groups'
/// meshes, between the hosts. Throws Error, on all ranks that share it, for a parameter whose
/// shards come from other tensors.
void check_origins(const std::vector<const ParameterGroup*>& groups) {
  std::string difference;
  for (const ParameterGroup* group : groups) {
    const std::string found = different_origins(*group);
    difference = difference.empty() ? found : difference;
  }
  TESSERA_CHECK(difference.empty(), difference,
                ": the ranks filled the model with different values; give all ranks one seed "
                "(nn::init_weights, at::manual_seed before it is made), or load a checkpoint");
}

}  // namespace

void RandomAgreement::begin_forward(const std::vector<nn::ModuleBase*>& modules,
                                    const std::vector<DeviceMesh>& dims,
                                    const std::shared_ptr<tessera::detail::BatchRows>& rows,
                                    std::int64_t count, const ParameterGroupsToCompare& groups) {
  // All ranks have taken part in the comparison of an unexpected random operator.
  draws_ = draws_ || (unasked_ != nullptr && unasked_->is_settled());
  if (quiet_ && !draws_) {
    unasked_ = rows;
    return;
  }
  const std::vector<nn::Dropout*> dropouts = dropouts_of(modules);
  Counts counts = counts_of(dropouts);
  // Usually all ranks have the same numbers. The exchange of the rows carries the largest of each
  // number and, as complement, the least; the counts follow only if their hashes differ.
  const std::int64_t hash = hash_of(counts);
  const bool first = !compared_origins_;
  const auto compared = first ? groups() : std::vector<const ParameterGroup*>();
  const std::int64_t origin = hash_of_origins(compared);
  const auto largest = rows->settle({hash, ~hash, origin, ~origin, count, ~count});
  rows_ = {~largest[5], largest[4]};
  if (largest[0] != ~largest[1]) {
    // A rank that skipped an operator has counted less than the others.
    raise_to_largest(counts, dims);
    set_counts(dropouts, counts);
  }
  if (first && rows->is_settled()) {
    compared_origins_ = true;
    if (largest[2] != ~largest[3]) {
      check_origins(compared);
    }
  }
  draws_ = draws_ || (!agreed_.empty() && counts != agreed_);
  quiet_ = !draws_ && !agreed_.empty();
  agreed_ = std::move(counts);
}

}  // namespace tessera::fsdp
