// The spec of a parameter's shard, found before anything is changed: for a plain tensor on FSDP's
// mesh, for one that tensor parallelism has distributed on the mesh that joins both. fully_shard
// checks all parameters of a unit this way and only then acts (see unit/unit_spec.cpp).

#include "parameter/parameter_spec.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

/// Whether two slices of one mesh extend along one dimension of it, as flattened ones may that have
/// no name in common. Slices of different dimensions cross in this rank alone.
bool share_ranks(const DeviceMesh& a, const DeviceMesh& b) {
  return std::ranges::count_if(a.ranks(), [&](int rank) {
           return std::ranges::find(b.ranks(), rank) != b.ranks().end();
         }) > 1;
}

/// The submesh of the common root that has the dimensions of both meshes: first those that the root
/// lacks, which flatten() or unflatten() has made, then the root's in its order.
DeviceMesh joined_mesh(const DeviceMesh& outer, const DataMesh& data_mesh,
                       const std::string& name) {
  const DeviceMesh& mesh = data_mesh.all;
  const DeviceMesh root = mesh.root();
  const std::vector<std::string>& own = mesh.shape().names();
  const std::vector<std::string>& others = outer.shape().names();
  const bool disjoint =
      !own.empty() && std::ranges::none_of(own, [&](auto& dim) { return contains(others, dim); });
  TESSERA_CHECK(outer.root() == root && disjoint, "fully_shard: ", name, " is distributed on ",
                to_string(outer), ", which is not another slice of the mesh that ", to_string(mesh),
                " comes from; slice both from one mesh, for example mesh[\"tp\"] and mesh[\"dp\"]");
  TESSERA_CHECK(!share_ranks(outer, mesh), "fully_shard: ", name, " is distributed on ",
                to_string(outer), ", and was to be split over ", to_string(mesh),
                " as well, which contains it: a dimension splits a tensor once; give this "
                "parameter the other dimensions by Options::parameter_mesh, or leave it plain");
  const std::vector<std::string>& persistent = data_mesh.persistent().shape().names();
  const std::vector<std::string>& known = root.shape().names();
  std::vector<std::string> names;
  for (const std::vector<std::string>* dims : {&persistent, &others}) {
    std::ranges::copy_if(*dims, std::back_inserter(names),
                         [&](const std::string& dim) { return !contains(known, dim); });
  }
  std::ranges::copy_if(known, std::back_inserter(names), [&](const std::string& dim) {
    return contains(persistent, dim) || contains(others, dim);
  });
  // Not by the root: it does not know the names that unflatten() gave.
  std::vector<DeviceMesh> parts;
  for (const std::string& dim : names) {
    parts.push_back((contains(persistent, dim) ? data_mesh.persistent() : outer)[dim]);
  }
  return DeviceMesh::concatenate(parts);
}

/// A layout counts mesh dimensions by position, and the joined mesh has others in between: names
/// are what stays the same.
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

/// The digit that a further split divides: the only one, or one behind local digits, which count
/// equal parts. nullptr where tensor parallelism cuts in front of the last digit, too.
Digit* digit_to_split(std::vector<Digit>& digits) {
  if (digits.empty()) {
    digits.emplace_back();
  }
  const bool parts = std::all_of(digits.begin(), std::prev(digits.end()),
                                 [](const Digit& digit) { return digit.mesh_dims.empty(); });
  return parts ? &digits.back() : nullptr;
}

}  // namespace

std::int64_t parts_of(const at::Tensor& tensor, std::optional<std::int64_t> dim) {
  std::int64_t parts = 1;
  if (dim && tessera::is_distributed(tensor)) {
    const std::vector<Digit>& digits = sharding_spec(tensor).layout->digits(static_cast<int>(*dim));
    for (std::size_t i = 0; i + 1 < digits.size(); ++i) {
      parts *= digits[i].extent;
    }
  }
  return parts;
}

ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name) {
  DeviceMesh joined = mesh.persistent();
  Layout::Dims dims(static_cast<std::size_t>(tensor.dim()));
  if (tessera::is_distributed(tensor)) {
    const ShardingSpec& spec = sharding_spec(tensor);
    TESSERA_CHECK(!spec.layout->is_partial(), "fully_shard: ", name, " is a pending reduction, ",
                  to_string(*spec.layout), "; redistribute it to Replicate() or Shard(...) first");
    joined = joined_mesh(spec.mesh, mesh, name);
    dims = renumbered(*spec.layout, spec.mesh, joined);
  }
  if (dim) {
    // The innermost split: each rank of tensor parallelism shards its local part; of a fused weight
    // (q, k and v in one matrix) it shards each part separately.
    Digit* digit = digit_to_split(dims[static_cast<std::size_t>(*dim)]);
    TESSERA_CHECK(digit != nullptr, "fully_shard: dimension ", *dim, " of ", name, " of sizes ",
                  tensor.sizes(), " is split as ", to_string(*sharding_spec(tensor).layout),
                  ", and cannot be split further; let shard_placement return ",
                  tensor.dim() > 1 ? "Shard of another dimension or Replicate()" : "Replicate()");
    digit->mesh_dims.push_back(
        joined.ndim() == 1 ? 0 : joined.shape().dim(mesh.shard.shape().names().front()));
  }
  return {joined, Layout::intern(joined.shape().sizes(), std::move(dims))};
}

}  // namespace tessera::fsdp
