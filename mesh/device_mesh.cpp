// The mesh class for programs: a handle to an interned description (mesh_family.h), its queries,
// and the process groups of its dimensions. submesh.cpp makes meshes from meshes.
#include "tessera/mesh/device_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <set>
#include <utility>

#include "mesh_family.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

/// The name of a dimension, for messages and group names. Meshes without names use numbers: "dim0".
std::string dim_name(const MeshShape& shape, int dim) {
  return shape.names().empty() ? "dim" + std::to_string(dim)
                               : shape.names()[static_cast<std::size_t>(dim)];
}

/// Checks the ranks of a mesh without communication, in such a way that all ranks find the same
/// errors. If only some ranks rejected a mesh, the others would wait forever in its first group.
void check_ranks(const comm::WorldPtr& world, const std::vector<int>& ranks,
                 const MeshShape& shape) {
  TESSERA_CHECK(world != nullptr, "DeviceMesh: no world; pass world_from_environment()");
  TESSERA_CHECK(static_cast<std::int64_t>(ranks.size()) == shape.numel(), "DeviceMesh ",
                to_string(shape), ": ", ranks.size(), " ranks for ", shape.numel(),
                " positions; give one rank per position");
  const bool in_range =
      std::ranges::all_of(ranks, [&](int r) { return r >= 0 && r < world->size(); });
  const bool unique = std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size();
  TESSERA_CHECK(in_range && unique, "DeviceMesh ", to_string(shape),
                ": a rank is repeated or outside the world of ", world->size(),
                "; give different ranks, 0 to ", world->size() - 1);
}

}  // namespace

DeviceMesh::DeviceMesh(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape) {
  check_ranks(world, ranks, shape);
  const auto family = Family::of(world);
  impl_ = family->handle(family->member(nullptr, std::move(ranks), std::move(shape)));
}

/// Checks all groups before it stores the first group, so that an error leaves the mesh unchanged.
/// Holds the lock during the whole call, because another thread may be using a group.
DeviceMesh DeviceMesh::from_groups(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape,
                                   const std::vector<comm::CommunicatorPtr>& groups) {
  DeviceMesh mesh(std::move(world), std::move(ranks), std::move(shape));
  mesh.check_member("group");
  TESSERA_CHECK(groups.size() == static_cast<std::size_t>(mesh.ndim()), to_string(mesh), ": ",
                groups.size(), " groups were given; give one for each dimension");
  const std::lock_guard lock(mesh.impl().mutex);
  auto& known = mesh.impl().groups;
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    const auto& group = groups[static_cast<std::size_t>(dim)];
    // The order of ranks in a group decides which rank has which shard, so this rank's rank in the
    // group must equal its coordinate.
    const bool fits = group != nullptr && group->size() == mesh.size(dim) &&
                      group->rank() == mesh.local_rank(dim);
    TESSERA_CHECK(fits, to_string(mesh), ": the group given for ", dim_name(mesh.shape(), dim),
                  " must have ", mesh.size(dim), " ranks and this one as number ",
                  mesh.local_rank(dim));
    const auto other = known.find({dim});
    // The group must not be replaced: equal meshes are one object, and its existing group may have
    // pending collectives.
    TESSERA_CHECK(other == known.end() || other->second == group, to_string(mesh), ": ",
                  dim_name(mesh.shape(), dim),
                  " has a group already; make the mesh from groups before it is used, or give it "
                  "other names");
  }
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    known.emplace(std::vector<int>{dim}, groups[static_cast<std::size_t>(dim)]);
  }
  return mesh;
}

/// The description of the mesh. All queries call this function, so that the use of an unassigned
/// mesh is an Error and not a crash.
const DeviceMesh::Impl& DeviceMesh::impl() const {
  TESSERA_CHECK(impl_ != nullptr,
                "DeviceMesh: used before a mesh was assigned to it; "
                "make one with init_device_mesh()");
  return *impl_;
}

/// Throws Error if this rank is not a member. Other ranks may store and compare a mesh (pipeline
/// stages do), but have no coordinate in it.
void DeviceMesh::check_member(const char* wish) const {
  TESSERA_CHECK(contains_this_rank(), to_string(*this), ": rank ", world()->rank(),
                " is not a member and has no ", wish, "; ask contains_this_rank() first");
}

const MeshShape& DeviceMesh::shape() const {
  return impl().shape;
}
int DeviceMesh::ndim() const {
  return shape().ndim();
}
std::int64_t DeviceMesh::size() const {
  return shape().numel();
}
std::int64_t DeviceMesh::size(int dim) const {
  return shape().size(dim);
}
/// The size of the dimension `name`. A name that was given to flatten() stands for several
/// dimensions, whose sizes are multiplied.
std::int64_t DeviceMesh::size(std::string_view name) const {
  const auto dims = dims_called(name);
  return std::accumulate(dims.begin(), dims.end(), std::int64_t{1},
                         [&](std::int64_t sizes, int dim) { return sizes * size(dim); });
}
const std::vector<int>& DeviceMesh::ranks() const {
  return impl().ranks;
}
const comm::WorldPtr& DeviceMesh::world() const {
  return impl().family->world();
}
const std::string& DeviceMesh::device_type() const {
  return world()->options().device;
}
c10::Device DeviceMesh::device() const {
  if (device_type() == "meta") {
    return {c10::DeviceType::Meta};
  }
  return {device_type() == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU,
          static_cast<c10::DeviceIndex>(world()->device_index())};
}
const std::vector<std::int64_t>& DeviceMesh::coordinate() const {
  return impl().coordinate;
}
DeviceMesh DeviceMesh::root() const {
  return DeviceMesh(impl().family->handle(impl().root));
}

std::int64_t DeviceMesh::local_rank(int dim) const {
  check_member("coordinate");
  return coordinate()[static_cast<std::size_t>(shape().dim(dim))];
}

/// This rank's index along the dimension `name`. For a name that was given to flatten(), the index
/// in the flattened submesh.
std::int64_t DeviceMesh::local_rank(std::string_view name) const {
  const auto dims = dims_called(name);
  return dims.size() == 1 ? local_rank(dims.front()) : (*this)[name].local_rank();
}

std::int64_t DeviceMesh::local_rank() const {
  TESSERA_CHECK(ndim() == 1, to_string(*this), ": local_rank() needs a 1-D mesh; name a dimension");
  return local_rank(0);
}

/// An existing group is found without a lock, because each collective of every operator calls this
/// function. Release and acquire order the pointer after the group's construction. Groups exist as
/// long as the mesh family.
comm::Communicator& DeviceMesh::group(int dim) const {
  dim = shape().dim(dim);
  auto& known = impl().dim_groups[static_cast<std::size_t>(dim)];
  comm::Communicator* found = known.load(std::memory_order_acquire);
  if (found == nullptr) {
    found = &group(std::vector<int>{dim});
    known.store(found, std::memory_order_release);
  }
  return *found;
}

comm::Communicator& DeviceMesh::group(std::string_view name) const {
  const auto dims = dims_called(name);
  return dims.size() == 1 ? group(dims.front()) : (*this)[name].group();
}

comm::Communicator& DeviceMesh::group() const {
  TESSERA_CHECK(ndim() == 1, to_string(*this), ": group() needs a 1-D mesh; name a dimension");
  return group(0);
}

comm::Communicator& DeviceMesh::group(const std::vector<int>& dims) const {
  // Negative dimensions are replaced, so that -1 and ndim - 1 find one entry.
  std::vector<int> wrapped;
  for (const int dim : dims) {
    wrapped.push_back(shape().dim(dim));
  }
  // The lock is held while the group is made, which is collective. Otherwise a second thread could
  // make another group, without any other rank.
  const std::lock_guard lock(impl().mutex);
  comm::CommunicatorPtr& known = impl().groups[wrapped];
  if (known == nullptr) {
    check_member("group");
    std::vector<std::string> names;
    for (const int dim : wrapped) {
      names.push_back(dim_name(shape(), dim));
    }
    // If the group cannot be made, the entry stays null and the next call tries again.
    known = world()->group(ranks_through(ranks(), shape(), coordinate(), wrapped),
                           fmt::format("{}", fmt::join(names, "_")));
  }
  return *known;
}

/// Looks up the group by the list of all dimensions, so that a 1-D mesh uses the group of its
/// dimension.
comm::Communicator& DeviceMesh::group_of_all_ranks() const {
  std::vector<int> dims(static_cast<std::size_t>(ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  return group(dims);
}

std::vector<comm::Communicator*> DeviceMesh::all_groups() const {
  std::vector<comm::Communicator*> groups;
  for (int dim = 0; dim < ndim(); ++dim) {
    groups.push_back(&group(dim));
  }
  return groups;
}

DeviceMesh init_device_mesh(comm::WorldPtr world, std::vector<std::int64_t> sizes,
                            std::vector<std::string> names) {
  MeshShape shape(std::move(sizes), std::move(names));
  TESSERA_CHECK(world != nullptr, "init_device_mesh: no world; pass world_from_environment()");
  TESSERA_CHECK(shape.numel() == world->size(), "init_device_mesh ", to_string(shape),
                ": the sizes multiply to ", shape.numel(), ", but the world has ", world->size(),
                " ranks; make them equal");
  std::vector<int> ranks(static_cast<std::size_t>(world->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return DeviceMesh(std::move(world), std::move(ranks), std::move(shape));
}

std::string to_string(const DeviceMesh& mesh) {
  return mesh ? fmt::format("DeviceMesh({}, {})", to_string(mesh.shape()), mesh.device_type())
              : "DeviceMesh()";
}

std::ostream& operator<<(std::ostream& stream, const DeviceMesh& mesh) {
  return stream << to_string(mesh);
}

}  // namespace tessera
