#include "tessera/comm/detail/agreement.h"
#include "unit.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <iterator>
#include <sstream>

#include "tessera/comm/agreement.h"
#include "tessera/core/detail/environment.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

namespace {

// FSDP only averages gradients, so copies of a parameter that differ between ranks would stay
// different. check_copies() finds such copies by hashes.

// With replicas (HSDP, replicate()) every parameter has copies. Otherwise only parameters that are
// not split have copies.

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

/// Returns this rank's copies of parameters: of every parameter if `all` is true, otherwise only of
/// the parameters that are not split.
std::vector<Replica> copies(const ParameterGroup& group, bool all, Of of) {
  std::vector<Replica> replicas;
  for (const ShardedParameter& parameter : group.parameters()) {
    if (!parameter.sharded().is_meta() && (all || !parameter.shape().dim)) {
      replicas.push_back(copy_of(parameter, of));
    }
  }
  return replicas;
}

/// Throws Error on all ranks whose copies of a parameter (or of its gradient) differ. `label`: the
/// unit's name in the message. Collective over the groups' meshes if there are copies.
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

// check_same_parameters() is a debug check at a unit's first gather. If ranks built different
// models of equal size, collectives would give ranks wrong parameters without an error.

/// Returns text with the number of parameters of `groups`, then one line for each parameter.
std::string text_of(const std::vector<const ParameterGroup*>& groups) {
  std::vector<std::string> lines;
  for (const ParameterGroup* group : groups) {
    for (const ShardedParameter& parameter : group->parameters()) {
      lines.push_back(fmt::format("'{}' of sizes [{}], {}", parameter.name(),
                                  fmt::join(parameter.sharded().sizes(), ", "),
                                  c10::toString(parameter.dtype())));
    }
  }
  return fmt::format("{} parameters\n{}", lines.size(), fmt::join(lines, "\n"));
}

/// Throws Error, on all ranks of `mesh`, unless these ranks have equal parameters. `text`: a list
/// of this rank's parameters. Collective.
void compare_parameters(const DeviceMesh& mesh, c10::Device device, const std::string& text,
                        const std::string& label) {
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const auto hash = std::bit_cast<std::int64_t>(stream_of(text.c_str()));
  const auto hashes = comm::gather_on_hosts(group, {hash});
  if (std::ranges::all_of(hashes, [&](const auto& other) { return other == hashes.front(); })) {
    return;
  }
  const std::vector<std::string> texts = comm::gather_texts(group, device, text);
  const auto other =
      std::ranges::find_if(texts, [&](const std::string& each) { return each != texts.front(); });
  std::istringstream first(texts.front()), second(*other);
  std::string of_first, of_second;
  while (of_first == of_second && (first || second)) {
    std::getline(first, of_first);
    std::getline(second, of_second);
  }
  fail(label, ": the ranks have different parameters: rank ", mesh.ranks().front(), " has ",
       of_first, ", rank ", mesh.ranks()[static_cast<std::size_t>(other - texts.begin())], " has ",
       of_second, "; make the same model on every rank");
}

/// With TESSERA_DEBUG=1, throws Error unless all ranks of `mesh` and of the groups' meshes have
/// equal parameter names, shapes and dtypes. `label`: the unit's name in the message. Collective
/// with TESSERA_DEBUG=1.
void check_same_parameters(const std::vector<ParameterGroup>& groups, const DataMesh& mesh,
                           const std::string& label) {
  if (!tessera::detail::debug_checks()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  using Members = std::pair<DeviceMesh, std::vector<const ParameterGroup*>>;
  std::vector<Members> meshes{{mesh.all, {}}};
  for (const ParameterGroup& group : groups) {
    auto known = std::ranges::find(meshes, group.mesh().all, &Members::first);
    if (known == meshes.end()) {
      known = meshes.insert(known, {group.mesh().all, {}});
    }
    known->second.push_back(&group);
  }
  for (const auto& [own, members] : meshes) {
    compare_parameters(own, mesh.device(), text_of(members), label);
  }
}

/// Disables inference mode while the object exists, because training later uses tensors that are
/// made in this scope.
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

Unit::~Unit() {
  // The destructor frees the gradient states of `groups_`, so forget_reductions() removes the
  // pending reductions of these states from CommContext.
  forget_reductions();
}

/// No CommContext is created here, because units below a root use the root's CommContext.
const CommContextPtr& Unit::shared_comm_context() {
  if (comm_context_ == nullptr) {
    comm_context_ =
        std::make_shared<CommContext>(comm::make_streams(mesh_.device()), mesh_.device());
  }
  return comm_context_;
}

void Unit::set_comm_context(CommContextPtr context) {
  if (comm_context_ != nullptr && comm_context_ != context) {
    comm_context_->settle();
  }
  comm_context_ = std::move(context);
}

void Unit::prepare() {
  const OutsideInferenceMode ordinary;
  // The exchange takes time, so ranks compare their parameters only in the first call.
  const bool is_first = phase_ == UnitPhase::kNew;
  if (is_first) {
    check_same_parameters(groups_, mesh_, label());
  }
  for (ParameterGroup& group : groups_) {
    group.prepare(comm_context());
  }
  // The copies are compared here, because the program can change parameters after fully_shard().
  if (is_first) {
    check_copies(groups_, Equality::kBitwise, Of::kValues, label());
  }
  reset_to_idle();
}

void Unit::compare_copies() const {
  check_copies(groups_, Equality::kRounded, Of::kValues, label());
  check_copies(groups_, Equality::kRounded, Of::kGradients, label());
}

bool Unit::start_gathers() {
  const OutsideInferenceMode ordinary;  // training can reuse the buffers that are allocated here
  bool began = false;
  for (ParameterGroup& group : groups_) {
    began |= group.gathered().start_unshard(comm_context());
  }
  return began;
}

void Unit::forget_reductions() {
  if (comm_context_ != nullptr) {
    comm_context_->forget(groups_);
  }
}

// When a training forward begins, ranks compare their counts of random operators. A comparison at
// the first random operator would wait forever if a rank skipped all random operators.

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

/// Returns how often this rank has called random operators, then each Dropout's call counter.
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

/// Sets each count to its maximum over all ranks of `dims`. Collective.
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

// Shards of a parameter from different tensors or random seeds would train without an error. So
// ranks compare each parameter's origin: a hash of the full tensor or of the seed.

/// Returns a hash of the origins (ShardedParameter::origin) of this rank's parameters of `groups`.
std::int64_t hash_of_origins(const std::vector<const ParameterGroup*>& groups) {
  Counts origins;
  for (const ParameterGroup* group : groups) {
    std::ranges::transform(group->parameters(), std::back_inserter(origins),
                           &ShardedParameter::origin);
  }
  return hash_of(origins);
}

/// Returns text about the parameters of `group` with different origins, or "". Skips ranks without
/// elements of a parameter, or that loaded the parameter from a checkpoint.
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

/// Called if hash_of_origins() differs between ranks. Throws Error on all ranks of a parameter
/// whose shards come from different tensors. Collective over the groups' meshes, with CPU values.
void check_origins(const std::vector<const ParameterGroup*>& groups) {
  std::string difference;
  for (const ParameterGroup* group : groups) {
    const std::string found = different_origins(*group);
    difference = difference.empty() ? found : difference;
  }
  TESSERA_CHECK(difference.empty(), difference,
                ": the ranks filled the model with different values; give all ranks one seed "
                "(nn::init_weights, at::manual_seed before construction), or load a checkpoint");
}

}  // namespace

void RandomAgreement::begin_forward(const std::vector<nn::ModuleBase*>& modules,
                                    const std::vector<DeviceMesh>& dims,
                                    const std::shared_ptr<tessera::detail::BatchRows>& rows,
                                    std::int64_t count, const ParameterGroupsToCompare& groups) {
  // If a random operator of the previous forward exchanged the batch rows, all ranks know already
  // that the model draws random numbers.
  draws_ = draws_ || (unasked_ != nullptr && unasked_->is_settled());
  if (quiet_ && !draws_) {
    unasked_ = rows;
    return;
  }
  const std::vector<nn::Dropout*> dropouts = dropouts_of(modules);
  Counts counts = counts_of(dropouts);
  // Counts are usually equal, so ranks first exchange only a hash. The maximum of ~hash over the
  // ranks gives the minimum of `hash`. Different minimum and maximum: ranks exchange the counts.
  const std::int64_t hash = hash_of(counts);
  const bool first = !compared_origins_;
  const auto compared = first ? groups() : std::vector<const ParameterGroup*>();
  const std::int64_t origin = hash_of_origins(compared);
  const auto largest = rows->settle({hash, ~hash, origin, ~origin, count, ~count});
  rows_ = {~largest[5], largest[4]};
  if (largest[0] != ~largest[1]) {
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
