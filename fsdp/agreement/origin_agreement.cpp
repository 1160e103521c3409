// Shards of one parameter are values of one tensor: of one that all ranks had, or of one seed.
// Their values say nothing of that, so what is compared is what they were cut from, or filled by.

#include "agreement/origin_agreement.h"

#include <algorithm>
#include <string>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/random.h"

namespace tessera::fsdp {
namespace {

using Origins = std::vector<std::int64_t>;

Origins origins_of(const ParameterGroup& group) {
  Origins origins;
  for (const ShardedParameter& parameter : group.parameters()) {
    origins.push_back(parameter.origin());
  }
  return origins;
}

/// What differs in `group`; empty: nothing. A rank without a part, or that loaded its part, has no
/// origin to compare.
std::string compare(const ParameterGroup& group) {
  const DeviceMesh& mesh = group.mesh().shard;
  if (mesh.size() == 1) {
    return "";
  }
  const std::vector<Origins> all = comm::gather_on_hosts(mesh.group(), origins_of(group));
  for (std::size_t i = 0; i < group.parameters().size(); ++i) {
    std::size_t first = all.size();
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank][i] == 0) {
        continue;
      }
      first = std::min(first, rank);
      if (all[rank][i] != all[first][i]) {
        return detail::concat("the shards of ", describe(*group.parameters()[i].slot()),
                              " on rank ", mesh.ranks()[first], " and rank ", mesh.ranks()[rank],
                              " are parts of different tensors");
      }
    }
  }
  return "";
}

}  // namespace

std::int64_t OriginAgreement::hash_of(const std::vector<const ParameterGroup*>& groups) {
  std::uint64_t hash = 0;
  for (const ParameterGroup* group : groups) {
    for (const std::int64_t origin : origins_of(*group)) {
      hash = substream(hash, static_cast<std::uint64_t>(origin));
    }
  }
  return static_cast<std::int64_t>(hash);
}

void OriginAgreement::settle(const std::vector<const ParameterGroup*>& groups, bool equal) {
  settled_ = true;
  std::string difference;
  if (!equal) {
    for (const ParameterGroup* group : groups) {
      const std::string found = compare(*group);
      difference = difference.empty() ? found : difference;
    }
  }
  TESSERA_CHECK(difference.empty(), difference,
                ": the ranks filled the model with different values; give all ranks one seed "
                "(nn::init_weights, at::manual_seed before it is made), or load a checkpoint");
}

}  // namespace tessera::fsdp
