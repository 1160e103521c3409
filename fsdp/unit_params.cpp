#include "tessera/comm/detail/agreement.h"
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
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

namespace {

// The functions below compare the copies of parameters on FSDP's ranks by a hash. Training would
// continue without an error with a different copy, because gradients are averaged over copies but
// values are not.

// With replicas (HSDP, replicate()) ranks have copies of all parameters. Without replicas, the
// ranks that shard have copies of the parameters that are not split.

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

/// The copies to compare: with `all`, the copies of every parameter; otherwise the copies of the
/// parameters that are not split.
std::vector<Replica> copies(const ParameterGroup& group, bool all, Of of) {
  std::vector<Replica> replicas;
  for (const ShardedParameter& parameter : group.parameters()) {
    if (!parameter.sharded().is_meta() && (all || !parameter.shape().dim)) {
      replicas.push_back(copy_of(parameter, of));
    }
  }
  return replicas;
}

/// Compares the copies of each parameter, or of its gradient, of the unit named `label`. If copies
/// differ, throws Error on all ranks that have the copies. Collective over the groups' meshes. Does
/// nothing where there are no copies.
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

// A debug check, at a unit's first gather, that all ranks have built equal models. Shards are
// padded to one size, so collectives of different parameters may succeed and give each rank the
// values of another parameter. No other check detects this mistake.

using Numbers = std::vector<std::int64_t>;

/// The hash of a parameter's description. Ranks exchange hashes instead of texts, whose lengths
/// differ; each rank prints its own text.
std::int64_t hash_of_line(const std::string& text) {
  return std::bit_cast<std::int64_t>(stream_of(text.c_str()));
}

/// The parameters of `groups` as text, one line for each parameter.
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

/// Compares the parameters of the ranks of `mesh`. Returns a text about a difference, or an empty
/// string. The text is the same on all ranks except for each rank's own parameters. `earlier`: the
/// result for smaller meshes. Collective.
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

  // The numbers of parameters are exchanged first, because gather_values needs the same number of
  // values from every rank.
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const std::vector<Numbers> counts = comm::gather_values(
      group, device, {static_cast<std::int64_t>(lines.size()), earlier.empty() ? 0 : 1});
  if (const std::size_t other = differs_from_first(counts, 0); other < counts.size()) {
    return fmt::format("rank {} has {} parameters, rank {} has {}", name(0), counts[0][0],
                       name(other), counts[other][0]);
  }
  const auto mismatched =
      std::ranges::find_if(counts, [](const Numbers& own) { return own[1] != 0; });
  // The result for smaller meshes is exchanged together with the numbers of parameters, so that all
  // ranks of a larger mesh learn of a difference that a smaller mesh found, and all of these ranks
  // throw.
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

/// With TESSERA_DEBUG=1, checks that in the unit named `label` all ranks of `mesh`, and of the
/// groups' own meshes, have parameters with equal names, sizes and types. Otherwise throws Error on
/// all of these ranks. Collective with TESSERA_DEBUG=1; without it, does nothing.
void check_same_parameters(std::vector<ParameterGroup>& groups, const DataMesh& mesh,
                           const std::string& label) {
  if (!tessera::detail::debug_checks()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  // Small meshes are visited first and the unit's mesh last, so that the error also stops ranks
  // that would continue with the next unit.
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

/// Disables inference mode while this object exists. Tensors made in this scope outlive the call,
/// and training also uses them.
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
  // Groups are made once: a later conversion changes the layout of a group but never its members.
  const Options& options = spec.options;
  for (const std::vector<ParameterSpec>& parameters : grouped(spec)) {
    groups_.emplace_back(parameters, options.mp_policy, options.post_forward_mesh_size, settings_);
  }
  // Other slices of the unit's mesh have other expert parameters, so gradient norms must include
  // the parameters of all slices. If one tensor is split over these slices as well, the mesh of the
  // tensor contains this information.
  for (const ParameterSpec& parameter : spec.parameters) {
    if (parameter.mesh.all != mesh_.all && !is_slice(mesh_.all, parameter.sharding.mesh)) {
      parameter.slot->set_distinct_along(mesh_.all);
    }
  }
}

UnitParameterGroups::~UnitParameterGroups() {
  // The reductions in progress are dropped, because the communication context contains pointers to
  // the gradient states of these groups.
  forget_reductions();
}

/// The communication context is created at the first use and not in the constructor, because units
/// below a root use the root's context.
const CommContextPtr& UnitParameterGroups::shared_comm_context() {
  if (comm_context_ == nullptr) {
    comm_context_ =
        std::make_shared<CommContext>(comm::make_streams(mesh_.device()), mesh_.device());
  }
  return comm_context_;
}

void UnitParameterGroups::set_comm_context(CommContextPtr context) {
  if (comm_context_ != nullptr && comm_context_ != context) {
    // The reductions of the old communication context are finished first, because nothing else
    // would finish these reductions after the change.
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
  // Copies are compared at the first prepare(), because the program may have put other values into
  // the slots since the unit was made.
  if (is_first) {
    check_copies(groups_, Equality::kBitwise, Of::kValues, settings_->label);
  }
}

void UnitParameterGroups::compare_copies() const {
  check_copies(groups_, Equality::kRounded, Of::kValues, settings_->label);
  check_copies(groups_, Equality::kRounded, Of::kGradients, settings_->label);
}

/// Makes the all-gather lane wait for the compute lane. Gathers in the compute lane need no wait.
void UnitParameterGroups::follow_compute() {
  if (!settings_->unshard_async_op) {
    comm_context().streams().order(comm::Lane::kCompute, comm::Lane::kAllGather);
  }
}

bool UnitParameterGroups::start_unshard() {
  const OutsideInferenceMode ordinary;  // the pool reuses these buffers in training
  bool began = false;
  for (ParameterGroup& group : groups_) {
    began |= group.gathered().start_unshard(comm_context());
  }
  return began;
}

/// Expert parameters are reduced over the ranks that have the same experts. The loss is the mean
/// over all ranks with different data, so gradients are divided by the number of these ranks.
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

// The ranks compare how many random numbers they have drawn when a forward begins, until they know
// that the model draws no random numbers. Whether a model draws random numbers is unknown before
// its forward. A rank may skip all random operators, so a comparison that starts at the first
// random operator could wait for that rank forever.

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

/// How many random numbers this rank has drawn: the number of calls of random operators, then the
/// call counter of each Dropout module.
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

/// Sets each of `counts` to the maximum of that count over all ranks of `dims`. Collective.
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

// The shards of one parameter must be parts of one tensor: a tensor that all ranks had, or values
// from one seed. Parts of different tensors have fitting sizes too, and training would continue
// without an error. The values of the shards do not show the mistake, so the ranks compare the
// origins of the values.

/// The hash of the origins (ShardedParameter::origin) of all parameters of `groups` on this rank.
std::int64_t hash_of_origins(const std::vector<const ParameterGroup*>& groups) {
  Counts origins;
  for (const ParameterGroup* group : groups) {
    std::ranges::transform(group->parameters(), std::back_inserter(origins),
                           &ShardedParameter::origin);
  }
  return hash_of(origins);
}

/// Describes the parameters of `group` whose origins differ between ranks; empty if there are none.
/// A rank that has no part, or that loaded its part, has no origin to compare.
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

/// Compares the origins of each parameter, for ranks whose hashes differ. If the shards of a
/// parameter are parts of different tensors, throws Error on all ranks that share the parameter.
/// Collective over the groups' meshes, between the hosts.
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
  // If a random operator of the previous forward compared the rows, all ranks took part in the
  // comparison, so the model draws random numbers on all ranks.
  draws_ = draws_ || (unasked_ != nullptr && unasked_->is_settled());
  if (quiet_ && !draws_) {
    unasked_ = rows;
    return;
  }
  const std::vector<nn::Dropout*> dropouts = dropouts_of(modules);
  Counts counts = counts_of(dropouts);
  // Usually all ranks have equal counts. The exchange of the rows also contains the hash of the
  // counts and its complement, which gives the maximum and the minimum of the hash. The counts
  // themselves are exchanged only if the hashes differ.
  const std::int64_t hash = hash_of(counts);
  const bool first = !compared_origins_;
  const auto compared = first ? groups() : std::vector<const ParameterGroup*>();
  const std::int64_t origin = hash_of_origins(compared);
  const auto largest = rows->settle({hash, ~hash, origin, ~origin, count, ~count});
  rows_ = {~largest[5], largest[4]};
  if (largest[0] != ~largest[1]) {
    // A rank that skipped a random operator has a lower count than the other ranks.
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
