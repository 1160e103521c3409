#include "moves.h"

namespace tessera::plan {

void all_to_all(const Place& place, std::vector<Step>& out) {
  for (const auto& tail : place.tails()) {
    for (const auto& landing : place.landings(tail.mesh_dims)) {
      if (landing.dim == tail.dim) continue;
      out.push_back({.kind = StepKind::kAllToAll,
                     .mesh_dims = tail.mesh_dims,
                     .dim = tail.dim,
                     .to_dim = landing.dim,
                     .from = place.layout(),
                     .to = place.moved(tail, landing)});
    }
  }
}

}  // namespace tessera::plan
