#include "without_unit_mesh_dims.h"

#include <algorithm>

namespace tessera::detail {

LayoutPtr without_unit_mesh_dims(LayoutPtr layout) {
  const auto& mesh = layout->mesh_sizes();
  const auto is_unit = [&](int dim) { return mesh[static_cast<std::size_t>(dim)] == 1; };
  if (std::find(mesh.begin(), mesh.end(), 1) == mesh.end()) return layout;
  auto dims = layout->dims();
  for (auto& digits : dims) {
    for (auto& digit : digits) std::erase_if(digit.mesh_dims, is_unit);
  }
  auto partial = layout->partial();
  std::erase_if(partial, [&](const auto& p) { return is_unit(p.mesh_dim); });
  return Layout::intern(mesh, std::move(dims), std::move(partial));
}

}  // namespace tessera::detail
