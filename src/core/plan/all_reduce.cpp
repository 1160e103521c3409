#include "moves.h"

namespace tessera::plan {

void all_reduce(const Place& place, std::vector<Step>& out) {
  for (auto& mesh_dims : place.reducible()) {
    const auto op = place.layout()->partial_on(mesh_dims.front())->op;
    const auto to = place.reduced(mesh_dims);
    out.push_back({.kind = StepKind::kAllReduce,
                   .mesh_dims = mesh_dims,
                   .op = op,
                   .from = place.layout(),
                   .to = to});
  }
}

}  // namespace tessera::plan
