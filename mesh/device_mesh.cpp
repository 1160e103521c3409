// Meshes of one World share a DeviceMesh::Family, which owns all mesh descriptions. Equal meshes
// are one object, because each operator compares meshes, by pointer.
#include "tessera/mesh/device_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/transform.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <ostream>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera {

namespace {

/// Returns the ranks of the submesh that has the dimensions `dims` and contains `coordinate`, in
/// row-major order of `dims`. `shape` and `ranks` describe the whole mesh.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims) {
  const MeshShape sub(dims | ranges::views::transform([&](int dim) { return shape.size(dim); }) |
                      ranges::to<std::vector>());
  std::vector<int> result;
  for (std::int64_t i = 0; i < sub.numel(); ++i) {
    const auto position = sub.coordinate(i);
    for (const auto& [dim, at] : ranges::views::zip(dims, position)) {
      coordinate[static_cast<std::size_t>(dim)] = at;
    }
    result.push_back(ranks[static_cast<std::size_t>(shape.index(coordinate))]);
  }
  return result;
}

/// Returns the ranks of the mesh with the dimensions `parts`, in row-major order; empty if `parts`
/// share a dimension. Each part lists ranks of `root`, including `own`. For root 0 to 7 and own 1,
/// the parts {1, 5} and {0, 1} give {0, 1, 4, 5}. Parts may be flattened, so positions in `root`
/// identify ranks.
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own) {
  const auto position = [&](int rank) {
    // If the root's ranks are 0, 1, 2 and so on, a rank is its own position, and no search is
    // needed.
    const auto same = static_cast<std::size_t>(rank);
    return same < root.size() && root[same] == rank ? static_cast<std::ptrdiff_t>(rank)
                                                    : std::ranges::find(root, rank) - root.begin();
  };
  const std::ptrdiff_t own_position = position(own);
  std::vector<std::ptrdiff_t> positions = {own_position};
  for (const std::vector<int>& part : parts) {
    std::vector<std::ptrdiff_t> longer;
    for (const std::ptrdiff_t start : positions) {
      for (const int rank : part) {
        longer.push_back(start + position(rank) - own_position);
      }
    }
    positions = std::move(longer);
  }
  const auto size = static_cast<std::ptrdiff_t>(root.size());
  // Submeshes that share a dimension give positions outside of the root mesh or equal positions.
  const bool inside = std::ranges::all_of(positions, [&](auto p) { return p >= 0 && p < size; });
  std::vector<std::ptrdiff_t> sorted = positions;
  std::ranges::sort(sorted);
  const bool unique = std::ranges::adjacent_find(sorted) == sorted.end();
  std::vector<int> ranks;
  if (inside && unique) {
    for (const std::ptrdiff_t p : positions) {
      ranks.push_back(root[static_cast<std::size_t>(p)]);
    }
  }
  return ranks;
}

std::vector<std::int64_t> coordinate_of(int rank, const std::vector<int>& ranks,
                                        const MeshShape& shape) {
  const auto self = std::ranges::find(ranks, rank);
  return self == ranks.end() ? std::vector<std::int64_t>{} : shape.coordinate(self - ranks.begin());
}

/// Maps each World to its DeviceMesh::Family. A template, because code outside of DeviceMesh cannot
/// name this private class.
template <class T>
struct Registry {
  std::mutex mutex;
  std::map<const comm::World*, std::weak_ptr<T>> families;
};

/// The map is never destroyed, because a mesh can outlive main().
template <class T>
Registry<T>& registry() {
  static auto* const families = new Registry<T>();
  return *families;
}

}  // namespace

/// The immutable description of a mesh, and the process groups of the mesh that exist so far.
struct DeviceMesh::Impl {
  Impl(Family* family, const Impl* root, std::vector<int> ranks, MeshShape shape, int own_rank)
      : family(family),
        root(root == nullptr ? this : root),
        ranks(std::move(ranks)),
        shape(std::move(shape)),
        coordinate(coordinate_of(own_rank, this->ranks, this->shape)),
        dim_groups(static_cast<std::size_t>(this->shape.ndim())) {}

  // A raw pointer, because the family owns this Impl, and every DeviceMesh keeps its family alive.
  Family* family;
  const Impl* root;
  // World ranks of the mesh, in row-major order of `shape`.
  std::vector<int> ranks;
  MeshShape shape;
  std::vector<std::int64_t> coordinate;

  /// The process group of each mesh dimension. The pointers are atomic, so that a collective finds
  /// its process group without a lock.
  mutable std::vector<std::atomic<comm::Communicator*>> dim_groups;
  // Protects `groups`. The key is a list of mesh dimensions, because their order decides the order
  // of ranks.
  mutable std::mutex mutex;
  mutable std::map<std::vector<int>, comm::CommunicatorPtr> groups;
};

/// All meshes of one World; equal meshes are one object. Every DeviceMesh shares ownership of its
/// family. Thread safe.
class DeviceMesh::Family : public std::enable_shared_from_this<Family> {
 public:
  /// Returns the only mesh family of `world`. A family owns its world, so the world's address is a
  /// unique key.
  static std::shared_ptr<Family> of(const comm::WorldPtr& world) {
    auto& [mutex, families] = registry<Family>();
    const std::lock_guard lock(mutex);
    std::weak_ptr<Family>& known = families[world.get()];
    std::shared_ptr<Family> family = known.lock();
    if (family == nullptr) {
      family = std::make_shared<Family>(world);
      known = family;
    }
    return family;
  }

  explicit Family(comm::WorldPtr world) : world_(std::move(world)) {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  /// The destructor removes this family from the registry. The destructor runs on the thread that
  /// destroys the last DeviceMesh of this family.
  ~Family() {
    auto& [mutex, families] = registry<Family>();
    const std::lock_guard lock(mutex);
    // The registry may have a newer mesh family of this World, which must not be removed.
    if (const auto entry = families.find(world_.get());
        entry != families.end() && entry->second.expired()) {
      families.erase(entry);
    }
  }

  const comm::WorldPtr& world() const { return world_; }
  std::shared_ptr<const Impl> handle(const Impl* impl) { return {shared_from_this(), impl}; }

  /// Returns the unique mesh with these ranks and shape and this `root` (nullptr: a root mesh). Not
  /// collective; process groups are made at their first use.
  const Impl* member(const Impl* root, std::vector<int> ranks, MeshShape shape) {
    const std::lock_guard lock(mutex_);
    auto& slot = members_[{root, ranks, shape.sizes(), shape.names()}];
    if (slot == nullptr) {
      slot = std::make_unique<Impl>(this, root, std::move(ranks), std::move(shape), world_->rank());
    }
    return slot.get();
  }

  /// Records flatten()'s `name` for the dimensions `dims` of `root`, with earlier flattened names
  /// expanded. Returns an empty list or, if `name` is taken, the dimensions of `name`.
  std::vector<std::string> remember_flattened(const Impl* root, const std::string& name,
                                              const std::vector<std::string>& dims) {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> all;
    for (const std::string& dim : dims) {
      const auto inner = flattened_.find({root, dim});
      std::ranges::copy(inner == flattened_.end() ? std::vector{dim} : inner->second,
                        std::back_inserter(all));
    }
    const auto known = flattened_.emplace(std::pair(root, name), all).first;
    return known->second == all ? std::vector<std::string>{} : known->second;
  }

  std::vector<std::string> flattened_dims(const Impl* root, const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto known = flattened_.find({root, name});
    return known == flattened_.end() ? std::vector<std::string>{} : known->second;
  }

 private:
  using Key = std::tuple<const Impl*, std::vector<int>, std::vector<std::int64_t>,
                         std::vector<std::string>>;

  comm::WorldPtr world_;
  mutable std::mutex mutex_;
  // All meshes of the family, until the family is destroyed. The key contains the root mesh: equal
  // slices of different root meshes are different meshes.
  std::map<Key, std::unique_ptr<Impl>> members_;
  // For each root mesh and name given to flatten(): the dimensions for which the name stands.
  std::map<std::pair<const Impl*, std::string>, std::vector<std::string>> flattened_;
};

namespace {

std::string dim_name(const MeshShape& shape, int dim) {
  return shape.names().empty() ? "dim" + std::to_string(dim)
                               : shape.names()[static_cast<std::size_t>(dim)];
}

/// Checks ranks without communication, so that all ranks find the same errors. Otherwise some ranks
/// would wait forever in a collective.
void check_ranks(const comm::WorldPtr& world, const std::vector<int>& ranks,
                 const MeshShape& shape) {
  TESSERA_CHECK(world != nullptr, "DeviceMesh: world is null; pass world_from_environment()");
  TESSERA_CHECK(static_cast<std::int64_t>(ranks.size()) == shape.numel(), "DeviceMesh ",
                to_string(shape), ": ", ranks.size(), " ranks were passed for ", shape.numel(),
                " positions; pass one rank for each position");
  const bool in_range =
      std::ranges::all_of(ranks, [&](int r) { return r >= 0 && r < world->size(); });
  const bool unique = std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size();
  TESSERA_CHECK(in_range && unique, "DeviceMesh ", to_string(shape),
                ": a rank is repeated or outside the world of ", world->size(),
                "; pass different ranks from 0 to ", world->size() - 1);
}

}  // namespace

DeviceMesh::DeviceMesh(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape) {
  check_ranks(world, ranks, shape);
  const auto family = Family::of(world);
  impl_ = family->handle(family->member(nullptr, std::move(ranks), std::move(shape)));
}

/// All process groups are checked before one is stored, so that an error leaves the mesh unchanged.
/// The mutex is locked, because other threads can use the mesh.
DeviceMesh DeviceMesh::from_groups(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape,
                                   const std::vector<comm::CommunicatorPtr>& groups) {
  DeviceMesh mesh(std::move(world), std::move(ranks), std::move(shape));
  mesh.check_member("group");
  TESSERA_CHECK(groups.size() == static_cast<std::size_t>(mesh.ndim()), to_string(mesh), ": ",
                groups.size(), " groups were passed; pass one group for each mesh dimension");
  const std::lock_guard lock(mesh.impl().mutex);
  auto& known = mesh.impl().groups;
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    const auto& group = groups[static_cast<std::size_t>(dim)];
    // The order of ranks in a process group decides the order of shards, so rank and mesh
    // coordinate must be equal.
    const bool fits = group != nullptr && group->size() == mesh.size(dim) &&
                      group->rank() == mesh.local_rank(dim);
    TESSERA_CHECK(fits, to_string(mesh), ": the group for ", dim_name(mesh.shape(), dim),
                  " must have ", mesh.size(dim), " ranks, and this rank must have rank ",
                  mesh.local_rank(dim), " in the group");
    const auto other = known.find({dim});
    // Another DeviceMesh can use an existing process group, with pending collectives. So the
    // process group must not be replaced.
    TESSERA_CHECK(other == known.end() || other->second == group, to_string(mesh), ": ",
                  dim_name(mesh.shape(), dim),
                  " already has a group; call from_groups() before the mesh is used, or use other "
                  "dimension names");
  }
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    known.emplace(std::vector<int>{dim}, groups[static_cast<std::size_t>(dim)]);
  }
  return mesh;
}

/// Returns the description of the mesh. All queries call this function, so that the use of a
/// default-constructed DeviceMesh throws Error and does not crash.
const DeviceMesh::Impl& DeviceMesh::impl() const {
  TESSERA_CHECK(
      impl_ != nullptr,
      "DeviceMesh: used before a mesh was assigned; create a mesh with init_device_mesh()");
  return *impl_;
}

/// Throws Error if this rank is not a member of the mesh: such a rank can store and compare the
/// mesh, but has no coordinate.
void DeviceMesh::check_member(const char* wish) const {
  TESSERA_CHECK(contains_this_rank(), to_string(*this), ": rank ", world()->rank(),
                " is not a member and has no ", wish, "; check contains_this_rank() first");
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

std::int64_t DeviceMesh::local_rank(std::string_view name) const {
  const auto dims = dims_called(name);
  return dims.size() == 1 ? local_rank(dims.front()) : (*this)[name].local_rank();
}

std::int64_t DeviceMesh::local_rank() const {
  TESSERA_CHECK(ndim() == 1, to_string(*this), ": local_rank() needs a 1-D mesh; pass a dimension");
  return local_rank(0);
}

/// Finds a process group without a lock, because every collective calls this function. Release and
/// acquire publish the constructed process group, which exists as long as the mesh.
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
  TESSERA_CHECK(ndim() == 1, to_string(*this), ": group() needs a 1-D mesh; pass a dimension");
  return group(0);
}

comm::Communicator& DeviceMesh::group(const std::vector<int>& dims) const {
  // Normalises negative dimensions, because -1 and ndim - 1 must find the same process group.
  std::vector<int> wrapped;
  for (const int dim : dims) {
    wrapped.push_back(shape().dim(dim));
  }
  // Locked during the collective construction: two threads of a rank that made the same process
  // group would wait forever.
  const std::lock_guard lock(impl().mutex);
  comm::CommunicatorPtr& known = impl().groups[wrapped];
  if (known == nullptr) {
    check_member("group");
    std::vector<std::string> names;
    for (const int dim : wrapped) {
      names.push_back(dim_name(shape(), dim));
    }
    // If group() throws, no process group is stored, so the next call tries again.
    known = world()->group(ranks_through(ranks(), shape(), coordinate(), wrapped),
                           fmt::format("{}", fmt::join(names, "_")));
  }
  return *known;
}

/// Returns the process group of all ranks of the mesh. In a 1-D mesh, the process group of the only
/// dimension has all ranks.
comm::Communicator& DeviceMesh::group_of_all_ranks() const {
  std::vector<int> dims(static_cast<std::size_t>(ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  return group(dims);
}

DeviceMesh init_device_mesh(comm::WorldPtr world, std::vector<std::int64_t> sizes,
                            std::vector<std::string> names) {
  MeshShape shape(std::move(sizes), std::move(names));
  TESSERA_CHECK(world != nullptr, "init_device_mesh: world is null; pass world_from_environment()");
  TESSERA_CHECK(shape.numel() == world->size(), "init_device_mesh ", to_string(shape),
                ": the sizes multiply to ", shape.numel(), ", but the world has ", world->size(),
                " ranks; make the two numbers equal");
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

namespace {

std::string listed(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

/// Makes or finds a mesh with the root of this mesh, also for a slice of a slice: equal submeshes
/// are one object.
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

/// flatten()'s names are looked up in the mesh family. Slices of several names are concatenated.
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

/// Throws Error unless `names` are in the order of the mesh dimensions, as in PyTorch; otherwise
/// there would be several submeshes with the same dimensions.
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
                "] repeats dimensions or changes their order; keep the order of the mesh");
  check_member("slice");
  return relative(ranks_through(ranks(), shape(), coordinate(), dims), MeshShape(sizes, names));
}

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

/// Records the flattened dimension's name for the root mesh, so that all slices of the root know
/// the name. Throws Error if the name already stands for other dimensions.
DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  TESSERA_CHECK(!shape().names().empty() || !name.empty(), to_string(*this),
                ": flatten() of an unnamed mesh needs a name");
  const std::string flat = name.empty() ? fmt::format("{}", fmt::join(shape().names(), "_")) : name;
  if (shape().names() == std::vector<std::string>{flat}) {
    return *this;
  }
  TESSERA_CHECK(!has(root().shape().names(), flat), to_string(*this), ": '", flat,
                "' is a dimension of the root mesh; choose another name");
  if (!shape().names().empty()) {
    const std::vector<std::string> known =
        impl().family->remember_flattened(impl().root, flat, shape().names());
    TESSERA_CHECK(known.empty(), to_string(*this), ": the flattened name '", flat,
                  "' already stands for the dimensions ", listed(known), "; choose another name");
  }
  return relative(ranks(), MeshShape({size()}, {flat}));
}

/// The list of ranks does not change: dividing a dimension keeps the row-major order.
DeviceMesh DeviceMesh::unflatten(std::string_view name, const std::vector<std::int64_t>& sizes,
                                 const std::vector<std::string>& names) const {
  const int dim = shape().dim(name);
  const MeshShape inner(sizes, names);
  TESSERA_CHECK(names.size() == sizes.size(), to_string(*this), ": unflatten '", name, "' got ",
                sizes.size(), " sizes and ", names.size(), " names; pass one name per size");
  TESSERA_CHECK(inner.numel() == size(dim), to_string(*this), ": unflatten '", name, "' into ",
                to_string(inner), ": the sizes multiply to ", inner.numel(), ", not ", size(dim),
                "; pass other sizes");
  std::vector<std::int64_t> all_sizes = shape().sizes();
  std::vector<std::string> all_names = shape().names();
  all_sizes.erase(all_sizes.begin() + dim);
  all_names.erase(all_names.begin() + dim);
  all_sizes.insert(all_sizes.begin() + dim, sizes.begin(), sizes.end());
  all_names.insert(all_names.begin() + dim, names.begin(), names.end());
  return relative(ranks(), MeshShape(all_sizes, all_names));
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  TESSERA_CHECK(!meshes.empty(), "concatenate: no meshes were passed; pass at least one mesh");
  const DeviceMesh root = meshes.front().root();
  std::vector<std::vector<int>> parts;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;
  for (const DeviceMesh& mesh : meshes) {
    TESSERA_CHECK(mesh.root() == root, "concatenate: ", to_string(mesh), " and ",
                  to_string(meshes.front()),
                  " come from different meshes; pass slices of one mesh");
    mesh.check_member("concatenation");
    parts.push_back(mesh.ranks());
    sizes.insert(sizes.end(), mesh.shape().sizes().begin(), mesh.shape().sizes().end());
    names.insert(names.end(), mesh.shape().names().begin(), mesh.shape().names().end());
  }
  const MeshShape shape(sizes, names);
  std::vector<int> ranks = product_through(root.ranks(), parts, root.world()->rank());
  TESSERA_CHECK(!ranks.empty(), "concatenate: ", to_string(shape), " of ", to_string(root),
                ": two of the meshes share a dimension; pass meshes of different dimensions");
  return root.relative(std::move(ranks), shape);
}

}  // namespace tessera
