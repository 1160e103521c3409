#include "moves.h"

namespace tessera::plan {

void slice(const Place& place, std::vector<Step>& out) {
  for (int m = 0; m < place.layout()->mesh_ndim(); ++m) {
    if (!place.is_replicated_on(m)) continue;
    const auto landing = place.final_landing({&m, 1});
    if (!landing) continue;
    out.push_back({.kind = StepKind::kSlice,
                   .mesh_dims = {m},
                   .dim = landing->dim,
                   .from = place.layout(),
                   .to = place.landed({&m, 1}, *landing)});
  }
}

}  // namespace tessera::plan
