#include "tessera/mesh/device_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera {

/// The immutable description, and the groups made for it so far.
struct DeviceMesh::Impl {
  Family* family = nullptr;
  std::vector<int> ranks;
  MeshShape shape;
  std::vector<std::int64_t> coordinate;

  mutable std::mutex mutex;
  mutable std::map<std::vector<int>, comm::CommunicatorPtr> groups;
};

/// A mesh with all its slices and flattenings. Every handle keeps the whole family alive, so equal
/// submeshes are one object for as long as anyone can compare them.
class DeviceMesh::Family : public std::enable_shared_from_this<Family> {
 public:
  explicit Family(comm::WorldPtr world) : world_(std::move(world)) {}

  const comm::WorldPtr& world() const { return world_; }

  /// The one member with these ranks and this shape; the first one is the root.
  std::shared_ptr<const Impl> member(std::vector<int> ranks, MeshShape shape) {
    const std::lock_guard lock(mutex_);
    auto& slot = members_[{ranks, shape.sizes(), shape.names()}];
    if (slot == nullptr) {
      slot = std::make_unique<Impl>();
      slot->family = this;
      slot->coordinate = coordinate_of(ranks, shape);
      slot->ranks = std::move(ranks);
      slot->shape = std::move(shape);
      if (root_ == nullptr) {
        root_ = slot.get();
      }
    }
    return {shared_from_this(), slot.get()};
  }

  std::shared_ptr<const Impl> root() { return {shared_from_this(), root_}; }

  /// Remembers that `name` is the flattening of these dimensions, so that slicing finds it.
  void remember_flattened(const std::string& name, const std::vector<std::string>& dims) {
    const std::lock_guard lock(mutex_);
    const auto [known, added] = flattened_.emplace(name, dims);
    TESSERA_CHECK(added || known->second == dims, "flatten: the name '", name,
                  "' already stands for dimensions ",
                  fmt::format("{}", fmt::join(known->second, ", ")), "; choose another name");
  }

  std::vector<std::string> flattened_dims(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto known = flattened_.find(name);
    return known == flattened_.end() ? std::vector<std::string>{} : known->second;
  }

 private:
  using Key = std::tuple<std::vector<int>, std::vector<std::int64_t>, std::vector<std::string>>;

  std::vector<std::int64_t> coordinate_of(const std::vector<int>& ranks,
                                          const MeshShape& shape) const {
    const auto self = std::ranges::find(ranks, world_->rank());
    return self == ranks.end() ? std::vector<std::int64_t>{}
                               : shape.coordinate(self - ranks.begin());
  }

  comm::WorldPtr world_;
  mutable std::mutex mutex_;
  std::map<Key, std::unique_ptr<Impl>> members_;
  std::map<std::string, std::vector<std::string>> flattened_;
  const Impl* root_ = nullptr;
};

namespace {

std::string join_names(const std::vector<std::string>& names, const char* separator) {
  return fmt::format("{}", fmt::join(names, separator));
}

/// The ranks that differ from `coordinate` in `dims` only, row-major in the order of `dims`.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims) {
  std::vector<std::int64_t> sizes;
  for (const int dim : dims) {
    sizes.push_back(shape.size(dim));
  }
  const MeshShape sub(sizes);
  std::vector<int> result;
  for (std::int64_t i = 0; i < sub.numel(); ++i) {
    const auto position = sub.coordinate(i);
    for (std::size_t d = 0; d < dims.size(); ++d) {
      coordinate[static_cast<std::size_t>(dims[d])] = position[d];
    }
    result.push_back(ranks[static_cast<std::size_t>(shape.index(coordinate))]);
  }
  return result;
}

std::string dim_name(const MeshShape& shape, int dim) {
  return shape.names().empty() ? "dim" + std::to_string(dim)
                               : shape.names()[static_cast<std::size_t>(dim)];
}

void check_mesh(const comm::WorldPtr& world, const std::vector<int>& ranks,
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
  check_mesh(world, ranks, shape);
  impl_ = std::make_shared<Family>(std::move(world))->member(std::move(ranks), std::move(shape));
}

const DeviceMesh::Impl& DeviceMesh::impl() const {
  TESSERA_CHECK(impl_ != nullptr,
                "DeviceMesh: used before a mesh was assigned to it; "
                "make one with init_device_mesh()");
  return *impl_;
}

DeviceMesh DeviceMesh::relative(std::vector<int> ranks, MeshShape shape) const {
  return DeviceMesh(impl().family->member(std::move(ranks), std::move(shape)));
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
  return size(shape().dim(name));
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

const std::vector<std::int64_t>& DeviceMesh::coordinate() const {
  return impl().coordinate;
}

std::int64_t DeviceMesh::local_rank(int dim) const {
  TESSERA_CHECK(contains_this_rank(), to_string(*this), ": rank ", world()->rank(),
                " is not a member, so it has no coordinate; ask contains_this_rank() first");
  return coordinate().at(static_cast<std::size_t>(dim));
}

std::int64_t DeviceMesh::local_rank(std::string_view name) const {
  return local_rank(shape().dim(name));
}

std::int64_t DeviceMesh::local_rank() const {
  TESSERA_CHECK(ndim() == 1, to_string(*this), ": local_rank() needs a 1-D mesh; name a dimension");
  return local_rank(0);
}

DeviceMesh DeviceMesh::operator[](std::string_view name) const {
  return slice({std::string(name)});
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string_view> names) const {
  return slice({names.begin(), names.end()});
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  TESSERA_CHECK(!names.empty(), to_string(*this), ": a slice needs at least one dimension name");
  if (names == shape().names()) {
    return *this;
  }
  if (names.size() == 1 && std::ranges::find(shape().names(), names[0]) == shape().names().end()) {
    if (const auto dims = impl().family->flattened_dims(names[0]); !dims.empty()) {
      return slice(dims).flatten(names[0]);
    }
  }
  std::vector<int> dims;
  std::vector<std::int64_t> sizes;
  for (const std::string& name : names) {
    dims.push_back(shape().dim(name));
    sizes.push_back(shape().size(dims.back()));
  }
  TESSERA_CHECK(std::ranges::adjacent_find(dims, std::greater_equal<>()) == dims.end(),
                to_string(*this), ": slice [", join_names(names, ", "),
                "] repeats a dimension or changes their order; keep the mesh's order");
  TESSERA_CHECK(contains_this_rank(), to_string(*this), ": rank ", world()->rank(),
                " is not a member and cannot slice it; ask contains_this_rank() first");
  return relative(ranks_through(ranks(), shape(), coordinate(), dims), MeshShape(sizes, names));
}

DeviceMesh DeviceMesh::root() const {
  return DeviceMesh(impl().family->root());
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  TESSERA_CHECK(!shape().names().empty() || !name.empty(), to_string(*this),
                ": flattening an unnamed mesh needs a name");
  const std::string flat = name.empty() ? join_names(shape().names(), "_") : name;
  const auto& root_names = root().shape().names();
  TESSERA_CHECK(ndim() == 1 || std::ranges::find(root_names, flat) == root_names.end(),
                to_string(*this), ": '", flat, "' is a dimension of the mesh; choose another name");
  if (!shape().names().empty()) {
    impl().family->remember_flattened(flat, shape().names());
  }
  return relative(ranks(), MeshShape({size()}, {flat}));
}

comm::Communicator& DeviceMesh::group(int dim) const {
  return group(std::vector<int>{dim});
}

comm::Communicator& DeviceMesh::group(std::string_view name) const {
  return group(shape().dim(name));
}

comm::Communicator& DeviceMesh::group() const {
  TESSERA_CHECK(ndim() == 1, to_string(*this), ": group() needs a 1-D mesh; name a dimension");
  return group(0);
}

comm::Communicator& DeviceMesh::group(const std::vector<int>& dims) const {
  const std::lock_guard lock(impl().mutex);
  comm::CommunicatorPtr& known = impl().groups[dims];
  if (known == nullptr) {
    TESSERA_CHECK(contains_this_rank(), to_string(*this), ": rank ", world()->rank(),
                  " is not a member and has no group in it; ask contains_this_rank() first");
    std::vector<std::string> names;
    for (const int dim : dims) {
      TESSERA_CHECK(dim >= 0 && dim < ndim(), to_string(*this), ": there is no dimension ", dim,
                    "; give 0 to ", ndim() - 1);
      names.push_back(dim_name(shape(), dim));
    }
    known =
        world()->group(ranks_through(ranks(), shape(), coordinate(), dims), join_names(names, "_"));
  }
  return *known;
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

}  // namespace tessera
