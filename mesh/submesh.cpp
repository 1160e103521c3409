// Makes meshes from meshes: slices, flattenings, unflattenings, concatenations.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "mesh_family.h"
#include "tessera/core/error.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {
namespace {

/// The names as text for messages.
std::string listed(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

/// All meshes made from one root, including slices of slices, are registered under the root, so a
/// submesh is one object, in whatever way the program makes it.
DeviceMesh DeviceMesh::relative(std::vector<int> ranks, MeshShape shape) const {
  const Impl& own = impl();
  if (ranks == own.root->ranks && shape == own.root->shape) {
    return root();
  }
  return DeviceMesh(
      own.family->handle(own.family->member(own.root, std::move(ranks), std::move(shape))));
}

DeviceMesh DeviceMesh::operator[](std::string_view name) const {
  return slice({std::string(name)});
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string_view> names) const {
  return slice({names.begin(), names.end()});
}

/// Usually all names are names of dimensions. Names given to flatten() are looked up in the root's
/// family. If both kinds occur, the slice is concatenated from its parts.
DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  TESSERA_CHECK(!names.empty(), to_string(*this), ": a slice needs at least one dimension name");
  if (names == shape().names()) {
    return *this;
  }
  const auto flattened = [this](const std::string& name) {
    return has(shape().names(), name) ? std::vector<std::string>{}
                                      : impl().family->flattened_dims(impl().root, name);
  };
  if (names.size() == 1) {
    const std::vector<std::string> dims = flattened(names.front());
    return dims.empty() ? slice_dims(names) : slice_dims(dims).flatten(names.front());
  }
  if (std::ranges::all_of(names, [&](const auto& name) { return flattened(name).empty(); })) {
    return slice_dims(names);
  }
  std::vector<DeviceMesh> parts;
  for (const std::string& name : names) {
    parts.push_back(slice({name}));
  }
  return concatenate(parts);
}

/// The dimensions must be in the order of the mesh, as in PyTorch; otherwise there would be several
/// submeshes with the same dimensions.
DeviceMesh DeviceMesh::slice_dims(const std::vector<std::string>& names) const {
  if (names == shape().names()) {
    return *this;
  }
  std::vector<int> dims;
  std::vector<std::int64_t> sizes;
  for (const std::string& name : names) {
    dims.push_back(shape().dim(name));
    sizes.push_back(shape().size(dims.back()));
  }
  TESSERA_CHECK(std::ranges::adjacent_find(dims, std::greater_equal<>()) == dims.end(),
                to_string(*this), ": slice [", listed(names),
                "] repeats a dimension or changes their order; keep the mesh's order");
  check_member("slice");
  return relative(ranks_through(ranks(), shape(), coordinate(), dims), MeshShape(sizes, names));
}

/// The dimension with this name, or the dimensions that flatten() gave the name to.
std::vector<int> DeviceMesh::dims_called(std::string_view name) const {
  const std::string text(name);
  std::vector<int> dims;
  if (!has(shape().names(), text)) {
    for (const auto& dim : impl().family->flattened_dims(impl().root, text)) {
      dims.push_back(shape().dim(dim));
    }
  }
  if (dims.empty()) {
    dims.push_back(shape().dim(name));
  }
  return dims;
}

/// The name is recorded for the root, so that every slice of the root finds the flattening. For a
/// mesh without names nothing is recorded. If the name is already recorded for other dimensions,
/// those dimensions must have the same ranks in the same order, as the dimensions of an unflattened
/// mesh do.
DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  TESSERA_CHECK(!shape().names().empty() || !name.empty(), to_string(*this),
                ": flattening an unnamed mesh needs a name");
  const std::string flat = name.empty() ? fmt::format("{}", fmt::join(shape().names(), "_")) : name;
  if (shape().names() == std::vector<std::string>{flat}) {
    return *this;
  }
  TESSERA_CHECK(!has(root().shape().names(), flat), to_string(*this), ": '", flat,
                "' is a dimension of the mesh it comes from; choose another name");
  if (!shape().names().empty()) {
    const std::vector<std::string> known =
        impl().family->remember_flattened(impl().root, flat, Family::dims_of_root(impl()));
    TESSERA_CHECK(known.empty(), to_string(*this), ": the flattened name '", flat,
                  "' already stands for the dimensions ", listed(known), "; choose another name");
  }
  return relative(ranks(), MeshShape({size()}, {flat}));
}

/// The list of ranks does not change, because its row-major order is the same before and after the
/// division.
DeviceMesh DeviceMesh::unflatten(std::string_view name, const std::vector<std::int64_t>& sizes,
                                 const std::vector<std::string>& names) const {
  const int dim = shape().dim(name);
  const MeshShape inner(sizes, names);
  TESSERA_CHECK(names.size() == sizes.size() && inner.numel() == size(dim), to_string(*this),
                ": unflatten '", name, "' into ", to_string(inner), ": the sizes multiply to ",
                inner.numel(), ", not ", size(dim), "; give named sizes that do");
  std::vector<std::int64_t> all_sizes = shape().sizes();
  std::vector<std::string> all_names = shape().names();
  all_sizes.erase(all_sizes.begin() + dim);
  all_names.erase(all_names.begin() + dim);
  all_sizes.insert(all_sizes.begin() + dim, sizes.begin(), sizes.end());
  all_names.insert(all_names.begin() + dim, names.begin(), names.end());
  return relative(ranks(), MeshShape(all_sizes, all_names));
}

/// All meshes must have one root, because ranks of unrelated meshes have no product.
DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  TESSERA_CHECK(!meshes.empty(), "concatenate: no meshes were given; give at least one");
  const DeviceMesh root = meshes.front().root();
  std::vector<std::vector<int>> parts;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;
  for (const DeviceMesh& mesh : meshes) {
    TESSERA_CHECK(mesh.root() == root, "concatenate: ", to_string(mesh), " and ",
                  to_string(meshes.front()), " come from different meshes; slice both from one");
    mesh.check_member("concatenation");
    parts.push_back(mesh.ranks());
    sizes.insert(sizes.end(), mesh.shape().sizes().begin(), mesh.shape().sizes().end());
    names.insert(names.end(), mesh.shape().names().begin(), mesh.shape().names().end());
  }
  const MeshShape shape(sizes, names);
  std::vector<int> ranks = product_through(root.ranks(), parts, root.world()->rank());
  TESSERA_CHECK(!ranks.empty(), "concatenate: ", to_string(shape), " of ", to_string(root),
                ": two of the meshes share a dimension; give disjoint ones");
  return root.relative(std::move(ranks), shape);
}

}  // namespace tessera
