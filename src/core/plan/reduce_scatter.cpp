#include "moves.h"

namespace tessera::plan {

void reduce_scatter(const Place& place, std::vector<Step>& out) {
  for (const auto& set : place.reducible()) {
    const auto mesh_dims = place.in_final_order(set);
    for (const auto& landing : place.landings(mesh_dims)) {
      out.push_back({.kind = StepKind::kReduceScatter,
                     .mesh_dims = mesh_dims,
                     .dim = landing.dim,
                     .op = place.layout()->partial_on(mesh_dims.front())->op,
                     .from = place.layout(),
                     .to = place.landed(mesh_dims, landing)});
    }
  }
}

}  // namespace tessera::plan
