// Shards of one parameter must be parts of one tensor: of one that all ranks had, or of one seed.
// The values do not show that, so the ranks compare what they were cut from, or filled by.

#include "agreement/origin_agreement.h"

#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/origins.h"

namespace tessera::fsdp {
namespace {

/// What differs in `group`; empty: nothing. A rank without a part, or that loaded its part, has no
/// origin to compare.
std::string compare(const ParameterGroup& group) {
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

}  // namespace

std::int64_t OriginAgreement::hash_of(const std::vector<const ParameterGroup*>& groups) {
  std::uint64_t hash = 0;
  for (const ParameterGroup* group : groups) {
    for (const ShardedParameter& parameter : group->parameters()) {
      hash = substream(hash, static_cast<std::uint64_t>(parameter.origin()));
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
