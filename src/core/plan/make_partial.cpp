#include <algorithm>

#include "moves.h"

namespace tessera::plan {

void make_partial(const Place& place, std::vector<Step>& out) {
  const auto& now = place.layout()->partial();
  for (const auto& wanted : place.problem().to->partial()) {
    // Identities of an outer reduction would not survive an inner one that doesn't commute.
    const bool survives = std::all_of(now.begin(), now.end(), [&](const PartialDim& p) {
      return p.mesh_dim < wanted.mesh_dim || commute(p.op, wanted.op);
    });
    if (!place.is_replicated_on(wanted.mesh_dim) || !survives) continue;
    out.push_back({.kind = StepKind::kMakePartial,
                   .mesh_dims = {wanted.mesh_dim},
                   .op = wanted.op,
                   .from = place.layout(),
                   .to = place.made_partial(wanted)});
  }
}

}  // namespace tessera::plan
