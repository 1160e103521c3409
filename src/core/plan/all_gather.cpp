#include "moves.h"

namespace tessera::plan {

void all_gather(const Place& place, std::vector<Step>& out) {
  for (const auto& tail : place.tails()) {
    out.push_back({.kind = StepKind::kAllGather,
                   .mesh_dims = tail.mesh_dims,
                   .dim = tail.dim,
                   .from = place.layout(),
                   .to = place.without(tail)});
  }
}

}  // namespace tessera::plan
