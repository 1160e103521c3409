// Whether a model draws random numbers is unknown before its forward. A rank may skip all random
// operators: a comparison of rows that the first of them started would wait for that rank. So the
// ranks compare when the forward begins, until it is known that nothing is drawn.

#include "agreement/random_agreement.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::fsdp {
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
