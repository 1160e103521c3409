#include <range/v3/range/conversion.hpp>
#include <range/v3/view/transform.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

#include "mesh_family.h"

namespace tessera {

/// `coordinate` is a copy, in which the entries for `dims` are overwritten; all other entries
/// remain this rank's.
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

/// Uses positions in the list of the root's ranks instead of coordinates, because the parts need
/// not be dimensions of the root (flattened dimensions, slices of slices).
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own) {
  const auto position = [&](int rank) {
    // Usually the root has the ranks 0, 1, 2 and so on, so the position of a rank is tried first
    // and thousands of ranks are not searched.
    const auto same = static_cast<std::size_t>(rank);
    return same < root.size() && root[same] == rank ? static_cast<std::ptrdiff_t>(rank)
                                                    : std::ranges::find(root, rank) - root.begin();
  };
  // A rank's position in the root is the sum of coordinate times stride over the root's dimensions,
  // so the offsets of steps along different dimensions can be added.
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
  // Checks that no position is outside of the root. Parts that share a dimension would lead
  // outside, or would give one rank twice.
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

namespace {

/// The coordinate of `rank`, from its position in the list of ranks; empty if the rank is not in
/// the list.
std::vector<std::int64_t> coordinate_of(int rank, const std::vector<int>& ranks,
                                        const MeshShape& shape) {
  const auto self = std::ranges::find(ranks, rank);
  return self == ranks.end() ? std::vector<std::int64_t>{} : shape.coordinate(self - ranks.begin());
}

/// A template because DeviceMesh::Family is private: members can name it, but this file-local code
/// cannot.
template <class T>
struct Registry {
  std::mutex mutex;
  std::map<const comm::World*, std::weak_ptr<T>> families;
};

/// Never destroyed, because a mesh may outlive main().
template <class T>
Registry<T>& registry() {
  static auto* const families = new Registry<T>();
  return *families;
}

}  // namespace

DeviceMesh::Impl::Impl(Family* family, const Impl* root, std::vector<int> ranks, MeshShape shape,
                       int own_rank)
    : family(family),
      root(root == nullptr ? this : root),
      ranks(std::move(ranks)),
      shape(std::move(shape)),
      coordinate(coordinate_of(own_rank, this->ranks, this->shape)),
      dim_groups(static_cast<std::size_t>(this->shape.ndim())) {}

/// Families are found by the world's address. A family owns its world, so the address is not reused
/// while the entry of the family is valid.
std::shared_ptr<DeviceMesh::Family> DeviceMesh::Family::of(const comm::WorldPtr& world) {
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

/// Removes the family from the table of families. Runs on any thread, when the last handle of a
/// mesh of the family is destroyed.
DeviceMesh::Family::~Family() {
  auto& [mutex, families] = registry<Family>();
  const std::lock_guard lock(mutex);
  // Does not remove the entry if it belongs to a newer family of this world.
  if (const auto entry = families.find(world_.get());
      entry != families.end() && entry->second.expired()) {
    families.erase(entry);
  }
}

/// Makes only the description of a mesh, and is not collective. Groups are made later, at their
/// first use.
const DeviceMesh::Impl* DeviceMesh::Family::member(const Impl* root, std::vector<int> ranks,
                                                   MeshShape shape) {
  const std::lock_guard lock(mutex_);
  auto& slot = members_[{root, ranks, shape.sizes(), shape.names()}];
  if (slot == nullptr) {
    slot = std::make_unique<Impl>(this, root, std::move(ranks), std::move(shape), world_->rank());
  }
  return slot.get();
}

std::vector<std::string> DeviceMesh::Family::dims_of_root(const Impl& mesh) {
  const MeshShape& all = mesh.root->shape;
  const std::vector<std::string>& own = mesh.shape.names();
  // A flattened dimension counts as a dimension of the root: comparing coordinates would not find
  // its parts of size 1.
  const auto is_of_root = [&](const std::string& name) {
    return std::ranges::find(all.names(), name) != all.names().end() ||
           !mesh.family->flattened_dims(mesh.root, name).empty();
  };
  if (all.names().empty() || std::ranges::all_of(own, is_of_root)) {
    return own;
  }
  const auto coordinate_of = [&](int rank) {
    const std::vector<int>& ranks = mesh.root->ranks;
    return all.coordinate(std::ranges::find(ranks, rank) - ranks.begin());
  };
  const std::vector<std::int64_t> first = coordinate_of(mesh.ranks.front());
  std::vector<int> dims;
  std::vector<std::string> names;
  for (int dim = 0; dim < all.ndim(); ++dim) {
    const auto at = static_cast<std::size_t>(dim);
    const auto differs = [&](int rank) { return coordinate_of(rank)[at] != first[at]; };
    if (std::ranges::any_of(mesh.ranks, differs)) {
      dims.push_back(dim);
      names.push_back(all.names()[at]);
    }
  }
  return ranks_through(mesh.root->ranks, all, first, dims) == mesh.ranks ? names : own;
}

/// Records the dimensions for which `name` stands. A name stands for one list of dimensions in all
/// slices of a root. Dimensions that were flattened before are replaced by the dimensions that they
/// consist of.
std::vector<std::string> DeviceMesh::Family::remember_flattened(
    const Impl* root, const std::string& name, const std::vector<std::string>& dims) {
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

std::vector<std::string> DeviceMesh::Family::flattened_dims(const Impl* root,
                                                            const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto known = flattened_.find({root, name});
  return known == flattened_.end() ? std::vector<std::string>{} : known->second;
}

}  // namespace tessera
