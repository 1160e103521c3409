#include "sharded_spec.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

/// The slice of the common root that has the dimensions of both meshes: flattened ones, then the
/// root's in its order.
DeviceMesh joined_mesh(const DeviceMesh& outer, const DataMesh& data_mesh,
                       const std::string& name) {
  const DeviceMesh& mesh = data_mesh.all;
  const DeviceMesh root = mesh.root();
  const std::vector<std::string>& own = mesh.shape().names();
  const std::vector<std::string>& others = outer.shape().names();
  const bool disjoint =
      !own.empty() && std::ranges::none_of(own, [&](auto& dim) { return contains(others, dim); });
  TESSERA_CHECK(outer != mesh, "fully_shard: parameter '", name, "' is split over ",
                to_string(mesh),
                " already, by a unit above perhaps; apply fully_shard to the lower modules first");
  TESSERA_CHECK(outer.root() == root && disjoint, "fully_shard: parameter '", name,
                "' is distributed on ", to_string(outer),
                ", which is not another slice of the mesh that ", to_string(mesh),
                " comes from; slice both from one mesh, for example mesh[\"tp\"] and mesh[\"dp\"]");
  const std::vector<std::string>& lying = data_mesh.persistent().shape().names();
  const std::vector<std::string>& known = root.shape().names();
  std::vector<std::string> names;
  std::ranges::copy_if(lying, std::back_inserter(names),
                       [&](const std::string& dim) { return !contains(known, dim); });
  std::ranges::copy_if(known, std::back_inserter(names), [&](const std::string& dim) {
    return contains(lying, dim) || contains(others, dim);
  });
  return root.slice(names);
}

/// `layout`, of a tensor on `from`, with the mesh dimensions renumbered for `to`.
Layout::Dims renumbered(const Layout& layout, const DeviceMesh& from, const DeviceMesh& to) {
  Layout::Dims dims = layout.dims();
  for (std::vector<Digit>& digits : dims) {
    for (Digit& digit : digits) {
      for (int& mesh_dim : digit.mesh_dims) {
        mesh_dim = to.shape().dim(from.shape().names()[static_cast<std::size_t>(mesh_dim)]);
      }
    }
  }
  return dims;
}

}  // namespace

ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name) {
  DeviceMesh joined = mesh.persistent();
  Layout::Dims dims(static_cast<std::size_t>(tensor.dim()));
  if (tessera::is_distributed(tensor)) {
    const ShardingSpec& spec = sharding_spec(tensor);
    TESSERA_CHECK(!spec.layout->is_partial(), "fully_shard: parameter '", name,
                  "' is a pending reduction, ", to_string(*spec.layout),
                  "; redistribute it to Replicate() or Shard(...) first");
    joined = joined_mesh(spec.mesh, mesh, name);
    dims = renumbered(*spec.layout, spec.mesh, joined);
  }
  if (dim) {
    std::vector<Digit>& digits = dims[static_cast<std::size_t>(*dim)];
    TESSERA_CHECK(digits.size() <= 1, "fully_shard: dimension ", *dim, " of parameter '", name,
                  "' is split inside groups of rows (a fused weight); shard another dimension");
    digits.resize(1);
    digits.front().mesh_dims.push_back(
        joined.ndim() == 1 ? 0 : joined.shape().dim(mesh.shard.shape().names().front()));
  }
  return {joined, Layout::intern(joined.shape().sizes(), std::move(dims))};
}

}  // namespace tessera::fsdp
